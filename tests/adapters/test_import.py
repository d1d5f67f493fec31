"""`agentrl import otlp`: traces become episodes whole or not at all; what they lack is said, what is wrong is refused."""

import gzip
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from agentrl.cli.main import main
from agentrl.workers.requests.import_request import prepare_import
from agentrl.workers.requests.stored_groups import prepare_stored
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import build
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.models.loading import load_tokenizer
from agentrl.workflow.spans import Span, traces
from agentrl.workflow.spans.traces import read_traces, traces_of
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.imported_runs import write_import
from agentrl.workflow.store.reads.episode_rows import load_episode
from agentrl.workflow.store.run_names import find_stored_policy
from agentrl.workflow.trajectory import Message, ToolCall
from tests.faults.test_mending import a_worker, do_jobs
from tests.project.documents import DOCS
from tests.support.document_blocks import read_blocks
from tests.support.played_runs import value, values
from tests.support.small_models import tiny_calling
from tests.support.traces import ANSWER, ASKED, CALL, TOOLS, document, flat, parts, reward, rollout, span, write

OTHER = Message("user", "What is 3 plus 3?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_calling(tmp_path_factory.mktemp("model"))


@pytest.fixture
def chat(model: Path) -> Chat:
    return Chat(load_tokenizer(model))


@pytest.fixture
def db(tmp_path: Path, migrated_file: Path) -> Iterator[Database]:
    with a_worker(tmp_path / "home", migrated_file) as found:
        yield found


def told(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What a command prints."""
    capsys.readouterr()
    found = main([*map(str, words)])
    out, err = capsys.readouterr()
    assert found == code, out + err
    return out + err


def four(chat: Chat | None) -> list[Span]:
    """Two rollouts of each of two tasks, of which the first two are right and wrong."""
    earned = ((1, 1.0, ASKED), (2, 0.0, ASKED), (3, 1.0, OTHER), (4, 0.0, OTHER))
    return [each for trace, value, asked in earned for each in rollout(chat, trace, value, asked)]


def test_import_of_exact_traces_can_be_trained_on(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", four(chat)), "--policy", model, "--name", "elsewhere")
    assert said.splitlines()[0] == "elsewhere: 4 episodes of 2 tasks, 8 turns, mean reward 0.5"
    assert "agentrl submit --from-episodes elsewhere" in said
    assert values(db, "SELECT kind || status || iterations_done FROM v_runs") == ["importdone1"]
    assert values(db, "SELECT reward FROM v_episodes ORDER BY id") == [1.0, 0.0, 1.0, 0.0]
    assert values(db, "SELECT mean_reward FROM groups") == [0.5, 0.5]
    assert values(db, "SELECT DISTINCT fate FROM v_ledger") == ["imported"]
    assert value(db, "SELECT count(*) FROM v_tool_calls WHERE result = '5' AND status = 'done'") == 4
    with db.read() as tx:
        episode = load_episode(tx, 1)
    assert (episode.final_answer, episode.stop_reason, len(episode.steps)) == ("5", "answered", 2)
    assert episode.tokens_of(0) == (*chat.opening([ASKED], TOOLS), *chat.turn(CALL, TOOLS))
    assert {each for step in episode.steps for each in step.behavior_logprobs} == {-0.5}
    keys = {"name": "learns", "source.runs": ["elsewhere"]}
    stored = prepare_stored(db, build(keys), dict.fromkeys(keys, "flag"), find_stored_policy(db, "elsewhere", None))
    planning.submit(db, stored.submission)
    do_jobs()
    assert value(db, "SELECT status FROM v_runs WHERE run = 'learns'") == "done"
    assert values(db, "SELECT DISTINCT fate FROM v_ledger WHERE run = 'learns'") == ["trained"]
    assert "cannot be verified: another system sampled it" in told(capsys, "replay", 1, "--verify", "all", code=6)


def test_import_without_tokens_can_be_imitated_but_not_trained(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [*rollout(chat, 1, 1.0), *rollout(None, 2, 0.0)]
    said = told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", mixed), "--policy", model)
    assert "1 of them have turns without token ids or logprobs" in said
    assert "agentrl sft --from-episodes import-1" in said
    assert "logprobs: not known" in told(capsys, "replay", 1)
    refused = told(capsys, "submit", "--from-episodes", "import-1", code=6)
    assert "recorded without all tokens and logprobs" in refused
    assert "agentrl sft --from-episodes import-1" in refused
    rescored = told(capsys, "rescore", "import-1", "--reward", "tool_use")
    assert "agentrl sft --from-episodes import-1 --reward-set tool_use" in rescored
    assert value(db, "SELECT count(*) FROM runs") == 1
    left = told(capsys, "import", "otlp", tmp_path / "t.jsonl", "--policy", model, "--exact-only", "--json")
    assert json.loads(left) == {
        "run": "import-2",
        "episodes": 1,
        "exact": True,
        "without": 0,
        "left_out": {"turns without token ids or logprobs": 1},
    }


def test_import_keeps_other_spans_beside_turns(
    db: Database, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [
        span(1, "invoke_agent", {}, error="ran out of money"),
        span(2, "chat", parts((ASKED,), ANSWER)),
        span(3, "agentlightning.message", {"agentlightning.message.body": "the plan", "agentrl.task.reference": "5"}),
        span(4, "big", {"text": "x" * 100_000}),
    ]
    told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", spans), "--policy", model)
    rows = values(db, "SELECT kind || ':' || name || ':' || coalesce(step, -1) FROM v_annotations ORDER BY id")
    assert rows == ["span:invoke_agent:-1", "message::0", "span:big:0"]
    assert value(db, "SELECT stop_reason || reference || error FROM v_episodes") == "agent_error5ran out of money"


def test_import_reads_lines_document_and_compressed_alike(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = four(chat)
    whole = json.dumps(document(spans), indent=1)
    (tmp_path / "whole.json").write_text(whole)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(whole.encode()))
    write(tmp_path / "lines.jsonl", spans)
    for name in ("whole.json", "packed.json.gz", "lines.jsonl"):
        assert "4 episodes of 2 tasks, 8 turns" in told(capsys, "import", "otlp", tmp_path / name, "--policy", model)
    assert value(db, "SELECT count(DISTINCT reward || sampled_tokens || final_answer) FROM v_episodes") == 2


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "There is no trace to import"),
    "garbage": (b"\xff\xfe", "is not an export of traces"),
    "a list": (b"[1, 2]", "is not an export of traces"),
    "half a line": (b'{"resourceSpans": []}\n{"resourceSpans": [\n', "Line 2 of"),
    "a bomb": (lambda: gzip.compress(b"\0" * (257 * 2**20), 1), "it has more than"),
    "no turn": ([span(1, "x", {})], "1: no model turn"),
    "a turn that makes no sense": (
        [span(1, "x", flat((ASKED,), ANSWER) | {"prompt_token_ids": ["a"]})],
        "a turn cannot be read: token ids must be",
    ),
    "a reward that is no number": ([*rollout(None, 1), reward(9, "nan")], "a reward cannot be read: a reward must be a finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_import_refused_is_one_sentence_and_leaves_nothing(
    db: Database, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    wrong, sentence = WRONG[name]
    wrong = wrong() if callable(wrong) else wrong
    file = tmp_path / "t.jsonl"
    file.write_bytes(wrong) if isinstance(wrong, bytes) else write(file, wrong)
    said = told(capsys, "import", "otlp", file, "--policy", model, code=2)
    assert sentence in said
    assert len(said.splitlines()) <= 2
    assert value(db, "SELECT count(*) FROM runs") == 0


def test_import_refuses_bad_arguments_and_foreign_tokens(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "t.jsonl", four(chat))
    assert "No such file" in told(capsys, "import", "otlp", tmp_path / "x", "--policy", model, code=2)
    assert "Did you mean 'genai'" in told(capsys, "import", "otlp", file, "--policy", model, "--adapter", "genia", code=2)
    told(capsys, "import", "otlp", file, "--policy", model, "--name", "mine")
    assert "A run called 'mine' exists" in told(capsys, "import", "otlp", file, "--policy", model, "--name", "mine", code=3)
    shifted = [
        span(1, "x", flat((ASKED,), ANSWER) | {"prompt_token_ids": [5], "response_token_ids": [7], "logprobs.content": "[-1]"})
    ]
    said = told(capsys, "import", "otlp", write(tmp_path / "u.jsonl", shifted), "--policy", model, code=8)
    assert "The tokens do not belong to" in said
    assert "Name the model that sampled them" in said
    assert value(db, "SELECT count(*) FROM runs") == 1


def test_import_refuses_pipe_folder_loop_and_endless_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, said in (
        ("pipe", "is not a file"),
        (".", "is not a file"),
        ("/dev/zero", "is not a file"),
        ("loop", "Cannot read"),
    ):
        with pytest.raises(DatasetError, match=said):
            read_traces(tmp_path / place)
    monkeypatch.setattr(traces, "TRACE_FILE_BOUNDS", replace(traces.TRACE_FILE_BOUNDS, bytes=2**24, spans=20_000))
    (tmp_path / "lines.gz").write_bytes(gzip.compress(b"{}\n" * 500_000, 1))
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match="more than 20000 spans, or lines"):
            read_traces(tmp_path / "lines.gz")
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20  # it took 90
    finally:
        tracemalloc.stop()


def test_import_with_long_resource_is_fast_and_unnamed() -> None:
    told = {name: ["1"] * 100_000 for name in ("rollout_id", "gen_ai.conversation.id", "attempt_id")}
    began = time.process_time()
    (trace,) = traces_of([replace(each, resource=told) for each in (span(n, "x", {}) for n in range(1, 5000))])
    assert (trace.key, len(trace.spans)) == (f"{1:032x}", 4999)
    assert time.process_time() - began < 5  # it took minutes


def test_import_uses_adapter_of_document(
    db: Database, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = (block.text for block in read_blocks(DOCS / "your-agent.md") if block.file == "my_adapter.py")
    (tmp_path / "my_adapter.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = write(tmp_path / "t.jsonl", [span(1, "ask", {"question": "2+3?", "said": "FIVE"})])
    told(capsys, "import", "otlp", file, "--policy", model, "--adapter", "my_adapter:loud")
    assert value(db, "SELECT final_answer FROM v_episodes") == "FIVE"
    broken = write(tmp_path / "u.jsonl", [span(1, "ask", {})])
    refused = told(capsys, "import", "otlp", broken, "--policy", model, "--adapter", "my_adapter:loud", code=2)
    assert "1: the adapter loud raised KeyError: 'question'" in refused


def test_import_assigns_reward_to_named_episode(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = []
    for trace, earned in ((1, 1.0), (2, 0.25)):
        turns = [replace(each, resource={"agentlightning.rollout_id": f"ro-{trace}"}) for each in rollout(chat, trace)]
        named = {"agentlightning.rollout_id": f"ro-{trace}"}
        told_at_the_end = reward(300 + trace, earned, trace=1)
        spans += [*turns, replace(told_at_the_end, attributes={**told_at_the_end.attributes, **named})]
    told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", spans), "--policy", model)
    assert values(db, "SELECT reward FROM v_episodes ORDER BY id") == [1.0, 0.25]


def test_import_assigns_reward_without_attempt_to_last(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"agentlightning.rollout_id": "ro-1"}
    turns = [replace(each, resource={**named, "agentlightning.attempt_id": "at-1"}) for each in rollout(chat, 1)]
    spans = [*turns, replace(reward(400, 0.5, trace=9), resource=named)]
    told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", spans), "--policy", model)
    assert values(db, "SELECT reward || ':' || steps FROM v_episodes") == ["0.5:2"]


def test_import_merges_call_traced_by_client_and_proxy(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = []
    for each in rollout(chat, 1):
        plain = {key: value for key, value in each.attributes.items() if key.startswith(("gen_ai.", "llm.request"))}
        outer = replace(each, span_id=f"f{each.span_id[1:]}", attributes=plain)
        spans += [outer, replace(each, parent_id=outer.span_id, start=each.start + 1)]
    said = told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", spans), "--policy", model)
    assert "1 episode of 1 task, 2 turns" in said
    assert "agentrl submit --from-episodes" in said
    assert value(db, "SELECT count(*) FROM v_annotations WHERE kind = 'span'") == 2


def test_import_orders_results_of_parallel_calls(
    db: Database, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = Message("assistant", "", tool_calls=tuple(ToolCall("calculator", {"expression": text}) for text in ("1+1", "2+2")))
    results = (Message("tool", "4", name="calculator"), Message("tool", "2", name="calculator"))
    turns = [flat((ASKED,), both), flat((ASKED, both, *results), ANSWER)]
    ids = {f"tool_calls.{place}.id": f"c{place}" for place in range(2)}
    turns[0] |= {f"gen_ai.completion.0.{key}": name for key, name in ids.items()}
    turns[1] |= {f"gen_ai.prompt.1.{key}": name for key, name in ids.items()}
    turns[1] |= {"gen_ai.prompt.2.tool_call_id": "c1", "gen_ai.prompt.3.tool_call_id": "c0"}
    spans = [span(number, "chat", told) for number, told in enumerate(turns, 1)]
    told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", spans), "--policy", model)
    assert values(db, "SELECT result FROM v_tool_calls ORDER BY call") == ["2", "4"]


def test_import_keeps_file_order_of_turns_without_times(
    db: Database, model: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [replace(each, span_id=f"{9 - place:016x}", start=0, end=0) for place, each in enumerate(rollout(chat, 1))]
    told(capsys, "import", "otlp", write(tmp_path / "t.jsonl", spans), "--policy", model)
    assert value(db, "SELECT final_answer || steps FROM v_episodes") == "52"


def test_import_is_complete_on_both_databases(database: Database, model: Path, chat: Chat) -> None:
    config = build({"model.path": str(model)})
    made = prepare_import(database, four(chat), config, None)
    run = write_import(database, made.submission, made.episodes)
    with database.read() as tx:
        rows = tx.execute(text("SELECT run, status, reward, steps FROM v_episodes ORDER BY id")).all()
        assert [tuple(row) for row in rows] == [(run, "done", reward, 2) for reward in (1.0, 0.0, 1.0, 0.0)]
        sums = tx.execute(text("SELECT status, episodes, tool_calls, mean_reward FROM v_iterations")).one()
        assert tuple(sums) == ("done", 4, 4, 0.5)


def test_import_that_breaks_leaves_nothing(db: Database, model: Path, chat: Chat) -> None:
    made = prepare_import(db, four(chat), build({"model.path": str(model)}), None)
    broken = [*made.episodes[:-1], replace(made.episodes[-1], reward=None)]  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):
        write_import(db, made.submission, broken)
    assert value(db, "SELECT (SELECT count(*) FROM runs) + (SELECT count(*) FROM episodes) + (SELECT count(*) FROM tasks)") == 0
