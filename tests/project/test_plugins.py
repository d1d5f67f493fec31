"""Plug-ins: a file is found by its name, a user's own code by its path, and a wrong name is helped on."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.workflow import rewards
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.hooks import Hook, load_hooks
from agentrl.workflow.plugins import find, names
from agentrl.workflow.trajectory import Episode, Message, Step, Task, ToolCall, ToolResult

REPOSITORY = Path(__file__).parents[2]


def test_plugin_files_define_object_of_their_name() -> None:
    for kind in ("datasets", "tools", "rewards", "envs", "tool_formats"):
        assert names(kind)
        for name in names(kind):
            assert find(kind, name) is not None


def test_find_suggests_nearest_name_or_list() -> None:
    with pytest.raises(ConfigError, match=r"No tool is called 'calculater'\. Did you mean 'calculator'"):
        find("tools", "calculater")
    with pytest.raises(ConfigError, match=r"Known: .*numeric_answer"):
        find("rewards", "zzz")


@pytest.mark.parametrize("name", ["", "..", "../secrets", "a.b", "calculator.py", "calc\x00", "__init__"])
def test_find_takes_no_name_as_path(name: str) -> None:
    with pytest.raises(ConfigError, match="No tool is called"):
        find("tools", name)


def test_find_loads_users_object_from_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugins.py").write_text("def answer(episode):\n    return 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find("rewards", "my_plugins:answer")(None) == 42


@pytest.mark.parametrize("path", ["no_such_module:x", "json:no_such_name", ":x", "json:", "..:x"])
def test_find_reports_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be found|is not a path"):
        find("rewards", path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", r"bad_file\.py:1: SyntaxError"),
        ("x = 1\nimport no_such_module\n", r"bad_file\.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1 / 0\n", r"bad_file\.py:1: ZeroDivisionError"),
        ("raise SystemExit(3)\n", r"bad_file\.py:1: SystemExit: 3"),
        ("x = 1\n", "has no attribute 'thing'"),
        ("thing = 1\n", "not callable but of type int"),
    ],
)
def test_find_names_line_and_error_of_failed_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "bad_file.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_file", raising=False)
    with pytest.raises(ConfigError, match=rf"'bad_file:thing' \(rewards\) .*{said}"):
        find("rewards", "bad_file:thing")


def test_find_names_plugin_file_broken_or_without_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking_one.py").write_text("")
    (tmp_path / "broken_one.py").write_text("import no_such_module\n")
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    with pytest.raises(ConfigError, match=r"'lacking_one' \(rewards\): .*lacking_one\.py defines no 'lacking_one'"):
        find("rewards", "lacking_one")
    with pytest.raises(ConfigError, match=r"'broken_one' \(rewards\) cannot be imported: .*broken_one\.py:1: "):
        find("rewards", "broken_one")


@pytest.mark.parametrize("kind", ["datasets", "tools", "envs", "algorithms", "rewards", "tool_formats"])
def test_find_refuses_object_of_wrong_kind(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"'os:path' \({kind}\) is no.* of type module"):
        find(kind, "os:path")


@pytest.mark.parametrize("path", ["x", "os:path", "agentrl.workflow.trajectory:Task", "no_module:x"])
def test_load_hooks_refuses_what_is_no_hook(path: str) -> None:
    with pytest.raises(ConfigError, match=r"Pass package\.module:|not a class derived from Hook|not callable"):
        load_hooks([path])


def test_load_hooks_makes_hooks_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_hooks.py").write_text("from agentrl.workflow.hooks import Hook\nclass Mine(Hook):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    [hook] = load_hooks(["my_hooks:Mine"])
    assert isinstance(hook, Hook)


def test_math_env_opens_with_prompt_and_offers_calculator() -> None:
    env = find("envs", "math")
    assert isinstance(env, Env)
    question = Message("user", "How many?")
    system, asked = env.reset(Task("t", (question,), "1"))
    assert (system.role, asked) == ("system", question)
    assert "calculator" in system.content
    assert "#### 36" in system.content
    assert list(env.toolset()) == ["calculator"]
    said = Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "1+1"}),))
    turn = Step(0, (), (), (), (), "stop", said, 0, results=(ToolResult("2"),))
    observed = env.step(Episode(Task("t", (question,), "1"), steps=(turn,)))
    assert observed == (Message("tool", "2", name="calculator"),)


def test_plugins_need_no_torch() -> None:
    code = (
        "import sys\nfrom agentrl.workflow.plugins import find, names\n"
        "for kind in ('datasets', 'tools', 'rewards', 'envs', 'tool_formats'):\n"
        "    [find(kind, name) for name in names(kind)]\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
