"""chat: at a real terminal with history, commands and streamed words; in a pipe a line for a line."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli.conversation import Talk
from agentrl.cli.main import main
from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import StateError
from agentrl.workflow.inference.open_policy import OpenPolicy, open_policy
from agentrl.workflow.plugins import find
from agentrl.workflow.tools import Tool
from agentrl.workflow.training.demonstrations import Demonstration, line_of, read_demonstrations
from agentrl.workflow.trajectory import Message, ToolCall
from bench.faults.fork_server import Nursery
from tests.support.pseudo_terminal import CTRL_C, CTRL_D, UP, Terminal
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_calling, tiny_random

CALLING = Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "6*7"}),))
ANSWER = Message("assistant", "42")


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_calling(tmp_path_factory.mktemp("calling"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("talk") / "tiny")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[OpenPolicy]:
    with open_policy(str(folder), max_new_tokens=64) as policy:
        yield policy


@pytest.fixture
def talk(opened: OpenPolicy, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Talk]:
    """Makes a conversation whose policy says these messages one after another; `asked` are the requests."""

    def make(*turns: Message, env: Env | None = None, asked: list[GenerateRequest] | None = None) -> Talk:
        answers = iter([chat().turn(turn) for turn in turns])

        def says(request: GenerateRequest) -> Any:
            if asked is not None:
                asked.append(request)
            return next(answers)

        monkeypatch.setattr(opened, "engine", ScriptedEngine(says, workers=1))
        return Talk(opened, env or find("envs", "arithmetic"))

    return make


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "AGENTRL_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "."}


@pytest.fixture
def terminal(environment: dict[str, str], folder: Path, forks: Nursery) -> Iterator[Callable[..., Terminal]]:
    """Opens `agentrl chat` at a terminal, with the slow engine."""
    made: list[Terminal] = []

    def make(*words: str, **more: str) -> Terminal:
        asked = [
            "chat",
            "--model-path",
            str(folder),
            "--env",
            "arithmetic",
            "--engine",
            "tests.support.slow_engine:slow",
            *words,
        ]
        made.append(Terminal(forks, *asked, environment=environment | more))
        return made[-1]

    yield make
    for each in made:
        each.close()


# at a terminal


def leave(screen: Terminal) -> None:
    screen.wait("> $")
    screen.type(CTRL_D)
    assert screen.end() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_chat_prompt_appears_before_model_is_loaded(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    screen = terminal(SLOW_START=str(tmp_path / "go"))
    at = screen.wait(r"/help lists the commands; Ctrl-D ends the chat\.\n> ")
    screen.type("/help\nhello\n")
    at = screen.wait("/replay +the conversation", at)
    at = screen.wait("loading .*tiny", at)
    (tmp_path / "go").touch()
    at = screen.wait("You said 1 lines\\.\n> ", at)
    leave(screen)


def test_chat_with_calls_is_streamed_saved_and_replayed(
    terminal: Callable[..., Terminal], home: Path, tmp_path: Path, folder: Path
) -> None:
    screen = terminal()
    at = screen.wait("tools: calculator.*\n> ")
    screen.type("What is 15 minus 8?\n")
    at = screen.wait('Let me see\\.\n  calculator {"expression": "15-8"}\n  -> 7\nIt is 7\\.\n> ', at)
    assert "<tool_call>" not in screen.shown
    screen.type("/replay\n")
    at = screen.wait("step 0  policy v0.*sampled tokens\n  user:\n    What is 15 minus 8\\?", at)
    at = screen.wait("call 0: calculator\n    expression: 15-8\n  result .*\n    7\n  logprobs: mean -0.500", at)
    at = screen.wait("2 turns, .* tokens\n> ", at)
    file = tmp_path / "shown.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}')  # without an end of its line
    screen.type(f"/save {file}\n")
    at = screen.wait("agentrl sft --dataset", at)
    at = screen.wait("> ", at)
    leave(screen)
    first, saved = read_demonstrations(DatasetConfig(name=str(file)))
    assert first.messages[0].content == "1 + 1?"
    assert [message.role for message in saved.messages] == ["user", "assistant", "tool", "assistant"]
    assert saved.messages[1].tool_calls[0].arguments == {"expression": "15-8"}
    learn = ["sft", "--dataset", str(file), "--model", str(folder), "--steps", "2", "--batch-size", "2", "--name", "learned"]
    assert main(learn) == 0
    assert (home / "models" / "learned" / "config.json").is_file()


def test_chat_ctrl_c_stops_answer_only(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("--max-new-tokens", "100000")
    at = screen.wait("\n> ")
    screen.type("half a line")
    at = screen.wait("half a line", at)
    at = screen.press(CTRL_C, "> $", at)
    screen.type("say it at long last\n")
    at = screen.wait("word word", at)
    screen.type(CTRL_C)
    at = screen.wait(r"\(stopped; your message was removed\)\n> ", at)
    assert screen.shown.count("word") < 50_000
    screen.type("/replay\n")
    at = screen.wait("\n0 turns, ", at)
    at = screen.wait("> ", at)
    screen.type("hello\n")
    at = screen.wait("You said 1 lines", at)
    leave(screen)


def test_chat_joins_continued_lines_and_remembers_history(terminal: Callable[..., Terminal], home: Path) -> None:
    screen = terminal()
    at = screen.wait("\n> ")
    screen.type("one \\\ntwo\n")
    at = screen.wait("You said 2 lines", at)
    screen.type('"""\none\ntwo\nthree"""\n')
    at = screen.wait("You said 3 lines", at)
    screen.type(" /reset is a word\n")
    at = screen.wait("You said 1 lines", at)
    screen.type("/resett\n")
    at = screen.wait("Did you mean '/reset'\\?", at)
    at = screen.wait("> ", at)
    leave(screen)
    assert os.stat(home / "chat_history").st_mode & 0o077 == 0
    again = terminal()
    at = again.wait("\n> ")
    again.type(UP + UP + "\n")
    at = again.wait("/reset is a word[^>]*You said 1 lines", at)
    leave(again)


def test_chat_text_moves_no_cursor_and_characters_are_complete(terminal: Callable[..., Terminal]) -> None:
    screen = terminal()
    at = screen.wait("\n> ")
    screen.type("mark\n")
    at = screen.wait("漢字 and 🙂\n> ", at)
    assert "\x1b[2J" not in screen.raw
    assert "\x1b]0;" not in screen.raw
    screen.type("think\n")
    screen.wait(r"\(thinks\) hm\ndone\n> ", at)


def test_chat_settings_change_during_conversation(terminal: Callable[..., Terminal]) -> None:
    screen = terminal()
    at = screen.wait("\n> ")
    for typed, shown in (
        ("/temperature 0.5", "temperature 0\\.5"),
        ("/temperature nan", "'nan' is not a temperature"),
        ("/temperature", "temperature 0\\.5"),
        ("/tools off", "off  calculator"),
        ("/tools on clock", "no tool 'clock'"),
        ("/save this", "\\.jsonl file"),
        ("/save this.jsonl", "Nothing to save"),
        ("hello", "You said"),
        ("/save /nowhere/this.jsonl", "No such file"),
        ("/reset", "conversation was deleted"),
    ):
        screen.type(f"{typed}\n")
        at = screen.wait(shown, at)
        at = screen.wait("\n> $", at)
    screen.type("/exit\n")
    assert screen.end() == 0


def test_chat_ends_with_sentence_if_model_cannot_load(environment: dict[str, str], tmp_path: Path, forks: Nursery) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    screen = Terminal(forks, "chat", "--model", str(tmp_path / "broken"), environment=environment)
    try:
        screen.wait("\n> ")
        screen.type("hello\n")
        assert screen.end() == 8
        assert "Traceback" not in screen.shown
    finally:
        screen.close()


def test_chat_can_be_left_while_model_loads(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    screen = terminal(SLOW_START=str(tmp_path / "never"))
    screen.wait("\n> ")
    leave(screen)


# in a pipe


def test_chat_in_pipe_answers_lines_without_colour(
    home: Path, calling: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 15 minus 8?\n/help\n\nnot read"))
    assert main(["chat", "--model", str(calling), "--env", "arithmetic", "--max_new_tokens", "40"]) == 0
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    assert "  calculator {" in told.out
    assert "forget the conversation" not in told.out
    assert sys.stdin.read() == "not read"
    assert not (home / "chat_history").exists()


# the conversation


def test_chat_continues_exact_tokens_until_tools_change(talk: Callable[..., Talk]) -> None:
    asked: list[GenerateRequest] = []
    made = talk(CALLING, ANSWER, ANSWER, ANSWER, asked=asked)
    assert [text for text, _ in made.answer("What is 6*7?")] == ['  calculator {"expression": "6*7"}', "  -> 42", "42"]
    list(made.answer("Sure?"))
    made.set_tools_off(frozenset({"calculator"}))
    list(made.answer("Without it?"))
    first, second, third, fourth = (request.prompt_ids for request in asked)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert "calculator" in chat().decode(first)
    assert "calculator(" not in chat().decode(fourth)
    assert "Sure?" in chat().decode(fourth)
    assert [step.index for step in made.steps] == [0, 1, 2, 3]
    assert [message.content for message in made.steps[3].prompt] == ["Without it?"]
    assert made.steps[3].new_row


def test_chat_undo_leaves_no_trace_and_draws_anew(talk: Callable[..., Talk]) -> None:
    asked: list[GenerateRequest] = []
    made = talk(ANSWER, ANSWER, ANSWER, asked=asked)
    list(made.answer("One?"))
    before = made.steps
    list(made.answer("Two?"))
    made.take_back()
    assert made.steps == before
    list(made.answer("Two?"))
    assert asked[1].prompt_ids == asked[2].prompt_ids
    assert asked[1].key != asked[2].key


def test_chat_reads_open_results_with_next_question(talk: Callable[..., Talk], opened: OpenPolicy) -> None:
    asked: list[GenerateRequest] = []
    made = talk(*[CALLING] * opened.limits.max_steps, ANSWER, asked=asked)
    assert list(made.answer("6*7?"))[-1][0].startswith("(stopped after")
    list(made.answer("Well?"))
    assert chat().decode(asked[-1].prompt_ids).count("42") == opened.limits.max_steps


def test_chat_tool_that_times_out_is_reported(talk: Callable[..., Talk]) -> None:
    import threading

    def calculator(expression: str) -> str:
        """Never answers."""
        threading.Event().wait()
        return expression

    made = talk(CALLING, ANSWER, env=Env(tools=(Tool(calculator, timeout_seconds=0.05),)))
    assert "took longer than 0.05 s" in "".join(text for text, _ in made.answer("6*7?"))


def test_chat_saves_no_cut_answer_as_demonstration(talk: Callable[..., Talk]) -> None:
    made = talk(Message("assistant", "7 " * 200), ANSWER)
    with pytest.raises(StateError, match="there is no answer"):
        made.demonstration()
    list(made.answer("Count."))
    with pytest.raises(StateError, match="was cut"):
        made.demonstration()
    made.reset()
    list(made.answer("6*7?"))
    assert made.demonstration().messages[-1] == ANSWER


@given(
    st.text(max_size=30),
    st.text(min_size=1, max_size=30),
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)),
)
def test_chat_saved_demonstration_is_read_back_or_refused(thought: str, content: str, arguments: dict[str, Any]) -> None:
    call = Message("assistant", content, thought, (ToolCall("calculator", arguments),))
    shown = Demonstration((Message("user", "x"), call, Message("tool", "7", name="calculator"), ANSWER))
    try:
        line = line_of(shown)
    except ValueError:
        return
    assert line.count(b"\n") == 1
    row = json.loads(line)
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments
