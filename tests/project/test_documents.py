"""What the documents say is so: links lead somewhere, commands and targets exist, tables are those of the code."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from agentrl.cli import main
from agentrl.cli.commands import COMMANDS
from agentrl.workflow import errors
from agentrl.workflow.config import RunConfig
from agentrl.workflow.plugins import KINDS
from agentrl.workflow.settings import Settings
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import TRANSITIONS
from tests.project.documents import DOCS, PAGES, ROOT, anchors, links, rows, section, shown

LONGEST = 160
"""Lines of the front page."""

STABILITY, DESIGN = DOCS / "stability.md", DOCS / "design.md"
MAKEFILE = (ROOT / "Makefile").read_text()


def ticked(text: str) -> list[str]:
    """What stands in back-ticks."""
    return re.findall(r"`([^`]+)`", text)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST


def test_readme_links_to_every_page() -> None:
    pages = {page for page in PAGES[1:] if not page.stem.endswith(".zh-CN")}  # the original links to its translation
    assert {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")} >= {*pages, ROOT / "LICENSE"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_document_links_lead_to_file_and_heading(page: Path) -> None:
    lost = []
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_document_commands_exist(page: Path) -> None:
    asked = {word for line in shown(page) for word in re.findall(r"(?<!import )\bagentrl ([a-z]+)", line)}
    assert asked <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_document_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    asked = {
        word for line in shown(page) for words in re.findall(r"\bmake((?: [a-z-]+\b(?!=))+)", line) for word in words.split()
    }
    assert asked <= targets


def test_document_commands_and_targets_are_recognised() -> None:
    words = [line for page in PAGES for line in shown(page)]
    assert sum("agentrl " in line for line in words) > 80
    assert sum("make " in line for line in words) > 25


def test_document_exit_codes_are_those_of_code() -> None:
    raised: dict[int, set[str]] = {0: set(), 130: set()}
    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, Exception) and "exit_code" in vars(thing):
            raised.setdefault(vars(thing)["exit_code"], set()).add(name)
    table = rows(section(STABILITY, "## Exit codes"))
    assert {int(code): set(ticked(classes)) for code, _, classes in table} == raised
    assert main.__doc__ is not None
    assert {int(code) for code in re.findall(r"\b(\d+) ", main.__doc__)} == set(raised)


def test_document_environment_variables_are_those_of_code() -> None:
    table = rows(section(STABILITY, "## Environment variables"))
    told = {ticked(name)[0]: (ticked(default) or [""])[0] for name, default, _ in table}
    fields = Settings.model_fields.items()
    assert told == {f"AGENTRL_{name.upper()}": "" if field.default is None else str(field.default) for name, field in fields}


def test_document_plugin_interfaces_exist() -> None:
    table = rows(section(STABILITY, "## Plug-in interfaces"))
    assert {ticked(cells[0])[0] for cells in table} == {*KINDS, "hooks"}
    for path in re.findall(r"`([\w.]*workflow\.[\w.]+)`", section(STABILITY, "## Plug-in interfaces")):
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path


def test_document_config_keys_are_those_of_code() -> None:
    told = section(STABILITY, "## Config keys").split("Those of the run itself are")[1].split("A key that is not known")[0]
    assert sorted(ticked(told)) == sorted(RunConfig.model_fields)


def test_document_rows_and_states_are_those_of_code() -> None:
    tables = section(DESIGN, "## The rows").split("| state |")
    assert sorted(name for cells in rows(tables[0]) for name in ticked(cells[0])) == sorted(schema.metadata.tables)
    told = {name: set(ticked(following)) for names, following in rows("| state |" + tables[1]) for name in ticked(names)}
    assert told == {name: set(following) for name, following in TRANSITIONS.items()}


def test_pre_commit_runs_the_lint_tools() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    hooks = [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]]
    recipe = re.findall(r"^\t\$\(BIN\)/(.+)$", MAKEFILE.split("\nlint: env\n")[1].split("\n\n")[0], re.MULTILINE)
    assert hooks == [f".venv/bin/{command.removesuffix(' .')}" for command in recipe]


def test_workflow_runs_required_checks() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert [step["with"]["python-version"] for step in job["steps"] if "python" in step.get("uses", "")] == [wanted]
