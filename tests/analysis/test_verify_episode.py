"""Is a record true? Real runs are done again whole, and whatever is tampered with afterwards is found and named."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.cli.main import main
from agentrl.workers.stack.process import database as process_database
from agentrl.workflow.agent import QUESTION
from agentrl.workflow.analysis.episode_diff import compare
from agentrl.workflow.analysis.verify_episode import check_rewards, check_tools
from agentrl.workflow.analysis.verify_tokens import TOLERANCES
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.envs import Env
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.episode_loader import pack, unpack
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.reads.provenance import find_origin
from agentrl.workflow.store.steps import commit_sampled
from agentrl.workflow.trajectory import Episode, Message, PolicyRef, SamplingKey, Step, Task, ToolCall, ToolResult
from bench.faults.fork_server import Nursery
from tests.conftest import forget_process
from tests.support.forked_stack import forked_stack
from tests.support.played_runs import altered, claim, finish, start, submission, value, values
from tests.support.played_runs import sampled as sampled_step
from tests.support.real_stack import SMALL, Stack
from tests.support.small_models import chat, tiny_calling

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learned to call the calculator, and little else."""
    return tiny_calling(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stack(model: Path, module_folder: Path, forks: Nursery, migrated_file: Path) -> Iterator[Stack]:
    """A stack that has done three runs of two iterations: `exact`; `limited` in float32, whose calls a stop string ended;
    `dated`, whose template prints the time.
    """
    with forked_stack(module_folder, forks, migrated_file) as made:
        asked = ["--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", *SMALL, "--max-new-tokens", "32"]
        limits = ("top_p=0.97", "min_p=0.001", "top_k=200", "stop=</tool_call>")
        ways = {"exact": ["model.numerics=exact"], "limited": [f"rollout.{limit}" for limit in limits]}
        for name, keys in ways.items():
            made.agentrl("submit", *asked, *(word for key in keys for word in ("-s", key)), "--name", name, "--wait")
        template = module_folder / "dated.jinja"
        template.write_text("{{ strftime_now('%d %H:%M:%S.%f') }}" + (model / "chat_template.jinja").read_text())
        made.agentrl("submit", *asked, "--chat-template", str(template), "--name", "dated", "--wait")
        yield made


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings of this process point to the stack, for tests that use it."""
    if "stack" in request.fixturenames:
        monkeypatch.setenv("AGENTRL_HOME", str(request.getfixturevalue("stack").home))
        monkeypatch.delenv("AGENTRL_DATABASE_URL", raising=False)
    forget_process()
    yield
    if process_database.made:
        process_database().close()
    forget_process()


class Asked:
    """What a command printed: its JSON on stdout, its remarks on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], words: Sequence[object], code: int) -> None:
        capsys.readouterr()
        found = main(["replay", *map(str, words)])
        self.out, self.err = capsys.readouterr()
        assert found == code, f"exit {found}\n{self.out}\n{self.err}"

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def trained_episode(stack: Stack, run: str = "exact", version: int = 1) -> int:
    """An episode of two steps with a call that was sampled from that version."""
    query = """SELECT e.episode_id FROM v_steps e JOIN v_tool_calls c ON c.episode_id = e.episode_id AND c.step = 0
        WHERE e.run = :run AND e.policy_version = :version AND e.step = 1 AND c.error_class IS NULL ORDER BY 1 LIMIT 1"""
    return int(value(stack.database, query, run=run, version=version))


@contextmanager
def altered_tokens(stack: Stack, episode: int, step: int, column: str, index: int, to: float) -> Iterator[None]:
    """One packed number of one step is another for a while."""
    kind = "f" if column == "behavior_logprobs" else "i"
    row = value(stack.database, "SELECT id FROM v_steps WHERE episode_id = :e AND step = :s", e=episode, s=step)
    numbers = unpack(kind, value(stack.database, f"SELECT {column} FROM step_tokens WHERE step_id = {row}"))
    numbers[index] = to
    with altered(stack.database, "step_tokens", column, f"step_id = {row}", pack(kind, numbers)):
        yield


def steps_of(stack: Stack, episode: int) -> Sequence[Step]:
    return episode_rows.find_episode(stack.database, episode).episode.steps


# --- a run as it was --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["exact", "limited"])
def test_verify_repeats_every_episode_of_run(stack: Stack, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    episodes = values(stack.database, "SELECT id FROM v_episodes WHERE run = :run ORDER BY id", run=run)[::3]
    found = [Asked(capsys, [episode, "--verify", "all", "--json"], 0).json for episode in episodes]
    steps = [step for document in found for step in document["tokens"]["steps"]]
    off, _ = TOLERANCES["exact" if run == "exact" else "float32"]
    assert {step["policy_version"] for step in steps} == {0, 1}
    assert all(step["mismatches"] == 0 and step["max_difference"] <= off for step in steps)
    assert sum(step["same"] for step in steps) >= 0.99 * sum(step["tokens"] for step in steps) > 100
    assert sum(document["tools"]["ran"] for document in found) > 5
    assert all(report["hooks"] == ["luck"] and report["parts"] == 1 for document in found for report in document["rewards"])
    assert all(document["same"] and document["rewards"][0]["same_code"] for document in found)


def test_verify_passes_later_if_prompts_show_time(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episodes = values(
        stack.database, "SELECT episodes.id FROM episodes JOIN runs ON runs.id = run_id WHERE runs.name = 'dated'"
    )
    assert episodes
    for episode in episodes:
        found = Asked(capsys, [episode, "--verify", "tokens", "--json"], 0).json["tokens"]
        assert found["prompt"] is None
        assert found["prompts"] > 0


def test_verify_report_is_short_and_complete(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    said = Asked(capsys, [trained_episode(stack), "--verify", "all"], 0).out
    for part in (
        "tools    1 call run again, 0 differ", "messages 2 prompts rebuilt from the results, 0 differ",
        "prompts  2 rendered again, none differs", "recomputed in exact",
        "policy v1", " 0 ties (within 1e-09), 0 mismatches", "rewards  default: 1 part recomputed, none differ",
        "from the record: luck (hooks)", "the same",
    ):  # fmt: skip
        assert part in said
    assert len(said.splitlines()) < 13


@pytest.mark.parametrize("run", ["exact", "limited"])
def test_verify_fork_skips_steps_of_parent(stack: Stack, capsys: pytest.CaptureFixture[str], run: str) -> None:
    parent = trained_episode(stack, run)
    ends_itself = chat().has_end_token(steps_of(stack, parent)[0].sampled_ids)
    assert ends_itself == (run == "exact"), "in the other a stop string ended the call"
    stack.agentrl("fork", str(parent), "--step", "1", "-n", "2", "--name", f"forks-{run}", "--wait")
    for fork in values(stack.database, f"SELECT id FROM v_episodes WHERE run = 'forks-{run}'"):
        found = Asked(capsys, [fork, "--verify", "all", "--json"], 0).json
        assert (found["same"], found["parent"], found["inherited"], found["tokens"]["parents"]) == (True, parent, 1, 1)
        assert found["tools"]["prompts"] == 1
        assert [(step["step"], step["mismatches"]) for step in found["tokens"]["steps"]] == [(1, 0)]
        assert found["tools"]["taken"]["parent's"] == 1
        found_parent, made = (episode_rows.find_episode(stack.database, episode).episode for episode in (parent, fork))
        asked = found_parent.steps[1].prompt_ids
        assert compare(found_parent, made).common >= len(
            replace(found_parent, steps=found_parent.steps[:1]).context_ids + asked
        )


def test_verify_copied_parent_checks_only_reward(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    parent = trained_episode(stack)
    stack.agentrl("fork", str(parent), "--step", "1", "-n", "1", "--with-parent", "--name", "beside", "--wait")
    *_, stand_in = values(stack.database, "SELECT id FROM v_episodes WHERE run = 'beside' ORDER BY sample")
    for what in ("tools", "tokens"):
        said = Asked(capsys, [stand_in, "--verify", what], 0).out
        assert f"2 steps not verified: inherited from the parent {parent}: agentrl replay {parent} --verify {what}" in said
        assert said.splitlines()[-1] == "nothing of its own to verify"
        assert Asked(capsys, [stand_in, "--verify", what, "--json"], 0).json["same"] is None
    assert Asked(capsys, [stand_in, "--verify", "all"], 0).out.splitlines()[-1] == "the same, in what is its own"


def test_verify_edited_fork_reads_its_opening(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    parent = trained_episode(stack)
    stack.agentrl("fork", str(parent), "--step", "1", "-n", "1", "--edit-message", "4711", "--name", "edited", "--wait")
    fork = value(stack.database, "SELECT id FROM v_episodes WHERE run = 'edited'")
    assert Asked(capsys, [fork, "--verify", "tools", "--json"], 0).json["tools"]["prompts"] >= 1
    group = value(stack.database, f"SELECT group_id FROM episodes WHERE id = {fork}")
    opening = [{"role": "tool", "content": "4712"}, {"role": "user", "content": QUESTION.content}]
    with altered(stack.database, "groups", "opening", f"id = {group}", json.dumps(opening)):
        found = Asked(capsys, [fork, "--verify", "tools", "--json"], 1).json["tools"]["reading"]
    assert (found["step"], found["recorded"]["content"], found["found"]["content"]) == (1, "4711", "4712")


def test_verify_options_exclude_each_other(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    Asked(capsys, [1, "--verify", "all", "--step", "0"], 2)
    Asked(capsys, [1, "--verify", "all", "--diff", "2"], 2)
    assert "'tokens'" in Asked(capsys, [1, "--verify", "token"], 2).err
    Asked(capsys, [99999, "--verify", "rewards"], 5)
    Asked(capsys, [1, "--diff", "99999"], 5)


# --- tampered with ----------------------------------------------------------------------------------------------------------


def test_verify_names_changed_token_and_expected_one(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    second = steps_of(stack, episode)[1].sampled_ids
    other = next(id for id in range(5, 99) if id != second[1])
    with altered_tokens(stack, episode, 1, "sampled_ids", 1, other):
        found = Asked(capsys, [episode, "--verify", "tokens", "--json"], 1).json["tokens"]
        said = Asked(capsys, [episode, "--verify", "tokens"], 1).out
    missed = found["draw"]
    assert (missed["step"], missed["token"]) == (1, 1)
    assert (missed["recorded_id"], missed["drawn_id"]) == (other, second[1])
    assert missed["distance"] > 1e-9
    assert found["steps"][0]["mismatches"] == 0
    assert "first: step 1, token 1\n" in said
    assert "NOT the same" in said


def test_verify_names_changed_logprob(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    recorded = steps_of(stack, episode)[0].behavior_logprobs[2]
    with altered_tokens(stack, episode, 0, "behavior_logprobs", 2, recorded - 1e-4):
        found = Asked(capsys, [episode, "--verify", "tokens", "--json"], 1).json["tokens"]
    assert (found["logprob"]["step"], found["logprob"]["token"]) == (0, 2)
    assert found["logprob"]["found"] == recorded
    assert found["draw"] is None
    assert found["steps"][0]["max_difference"] == pytest.approx(1e-4, rel=0.01)


def test_verify_names_wrong_finish_reason(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    ended = next(step for step in steps_of(stack, episode) if step.finish_reason == "stop")
    tokens = len(ended.sampled_ids)
    with altered(stack.database, "steps", "finish_reason", f"episode_id = {episode} AND number = {ended.index}", "length"):
        found = Asked(capsys, [episode, "--verify", "tokens", "--json"], 1).json["tokens"]
        said = Asked(capsys, [episode, "--verify", "tokens"], 1).out
    assert found["ending"] == {"step": ended.index, "tokens": tokens, "recorded": "length", "found": tokens}
    assert f"step {ended.index}: recorded as 'length' after {tokens} tokens, and token {tokens - 1} ends it" in said


def test_verify_names_changed_prompt_and_rendered_one(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    ids = steps_of(stack, episode)[1].prompt_ids
    with altered_tokens(stack, episode, 1, "prompt_ids", 3, ids[3] + 1):
        found = Asked(capsys, [episode, "--verify", "tokens", "--json"], 1).json["tokens"]["prompt"]
    assert (found["step"], found["part"], found["index"]) == (1, "prompt", 3)
    assert found["ids"] == [ids[3] + 1, ids[3]]


def test_verify_names_changed_tool_result(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    with altered(stack.database, "tool_calls", "result", f"episode_id = {episode} AND call = 0 AND step = 0", "4711"):
        found = Asked(capsys, [episode, "--verify", "tools", "--json"], 1).json["tools"]["first"]
    assert (found["step"], found["call"], found["tool"]) == (0, 0, "calculator")
    assert found["recorded"]["content"] == "4711"
    assert found["found"]["content"] == steps_of(stack, episode)[0].results[0].content  # type: ignore[index]


def test_verify_finds_changed_result_by_next_prompt(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    call = f"episode_id = {episode} AND call = 0 AND step = 0"
    with altered(stack.database, "tool_calls", "effects", call, "once"):
        assert Asked(capsys, [episode, "--verify", "tools", "--json"], 0).json["tools"]["taken"] == {"once": 1}
        with altered(stack.database, "tool_calls", "result", call, "4711"):
            found = Asked(capsys, [episode, "--verify", "tools", "--json"], 1).json["tools"]
            said = Asked(capsys, [episode, "--verify", "tools"], 1).out
    assert (found["ran"], found["misread"], found["reading"]["step"], found["reading"]["index"]) == (0, 1, 1, 0)
    assert found["reading"]["found"]["content"] == "4711"
    assert found["reading"]["recorded"]["content"] == steps_of(stack, episode)[0].results[0].content  # type: ignore[index]
    assert "messages 2 prompts rebuilt from the results, 1 differ\n  first: step 1, message 0" in said
    assert "now:      tool calculator: '4711'" in said


@pytest.mark.parametrize(
    ("table", "column", "condition", "part"),
    [
        ("rewards", "value", "episode_id = {} AND part = 'numeric_answer'", "numeric_answer"),
        ("rewards", "value", "episode_id = {} AND part = 'luck'", "reward"),
        ("episodes", "reward", "id = {}", "reward"),
    ],
)
def test_verify_names_changed_reward(
    stack: Stack, table: str, column: str, condition: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    episode = trained_episode(stack)
    with altered(stack.database, table, column, condition.format(episode), 0.25):
        (report,) = Asked(capsys, [episode, "--verify", "rewards", "--json"], 1).json["rewards"]
    assert [item["part"] for item in report["differences"]] == [part]
    assert 0.25 in (report["differences"][0]["recorded"], report["differences"][0]["found"] % 1)


def test_verify_reports_changed_reward_code_as_no_difference(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    run = value(stack.database, "SELECT id FROM runs WHERE name = 'exact'")
    with altered(stack.database, "reward_sets", "code_hash", f"run_id = {run} AND name = 'default'", "older"):
        assert "code of the rewards has changed" in Asked(capsys, [trained_episode(stack), "--verify", "rewards"], 0).out


def test_verify_refuses_flipped_weight_of_checkpoint(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    file = weights_file(stack)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert "altered" in Asked(capsys, [trained_episode(stack), "--verify", "all"], 9).err
    finally:
        file.write_bytes(whole)


def weights_file(stack: Stack) -> Path:
    """Of the policy that sampled the second iteration of the exact run."""
    query = "SELECT p.path FROM policies p JOIN runs r ON r.id = p.run_id WHERE r.name = 'exact' AND p.version = 1"
    return Path(value(stack.database, query)) / sealed_folder.MODEL


def test_verify_reports_collected_adapter(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    run = value(stack.database, "SELECT id FROM runs WHERE name = 'exact'")
    with altered(stack.database, "policies", "collected_at", f"run_id = {run} AND version = 1", "2026-01-02 03:04:05.000000"):
        asked = Asked(capsys, [episode, "--verify", "all", "--json"], 0)
        assert asked.json["tokens"]["steps"] == []
        assert asked.json["tokens"]["prompts"] == 2
        assert "NOT VERIFIED: the weights of policy v1 were removed at 2026-01-02 03:04:05 UTC" in asked.err
        assert "as far as it could be verified" in Asked(capsys, [episode, "--verify", "tokens"], 9).out
        Asked(capsys, [trained_episode(stack, version=0), "--verify", "tokens"], 0)


def test_verify_reports_missing_checkpoint(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    file = weights_file(stack)
    file.rename(file.with_suffix(".away"))
    try:
        assert "the weights of policy v1 are missing in" in Asked(capsys, [trained_episode(stack), "--verify", "all"], 0).err
        Asked(capsys, [trained_episode(stack), "--verify", "tokens"], 9)
    finally:
        file.with_suffix(".away").rename(file)


def test_verify_refuses_other_base_or_template(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    episode = trained_episode(stack)
    run = value(stack.database, "SELECT id FROM runs WHERE name = 'exact'")
    with altered(stack.database, "runs", "base_hash", f"id = {run}", "0" * 64):
        assert "base 000000000000" in Asked(capsys, [episode, "--verify", "all"], 8).err
    manifest = json.loads(value(stack.database, f"SELECT manifest FROM runs WHERE id = {run}"))
    with altered(stack.database, "runs", "manifest", f"id = {run}", json.dumps({**manifest, "template": "1" * 64})):
        assert "template 111111111111" in Asked(capsys, [episode, "--verify", "tokens"], 8).err


def test_verify_reads_provenance_on_both_databases(database: Database) -> None:
    (group, *_) = start(database, submission(seed=3))
    work = claim(database, group)
    commit_sampled(database, work.fence, [sampled_step(work)])
    finish(database, work, 0, 0.5, {"numeric_answer": 0.5, "luck": 1.0})
    episode = work.episodes[0]
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE policies SET path = 'out/v0', collected_at = created_at"))
    origin = find_origin(database, episode.id)
    assert origin.key == SamplingKey(3, "train", 0, work.task.key, 0)
    assert origin.policies == {0: PolicyRef("tiny", "hash", "out/v0", "", 0)}
    assert origin.collected[0].year > 2000
    assert origin.reward_sets["default"].parts == {"numeric_answer": 0.5, "luck": 1.0}
    assert origin.reward_sets["default"].weights == work.weights
    assert origin.record.episode.id == episode.id


# --- two episodes -----------------------------------------------------------------------------------------------------------


def test_diff_finds_first_differing_token_of_siblings(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    query = """SELECT min(s.episode_id) FROM v_steps s JOIN v_episodes e ON e.id = s.episode_id
        WHERE e.run = 'exact' AND e.iteration = 1 AND e.slot = 0 AND s.step = 0 GROUP BY s.text ORDER BY 1 LIMIT 2"""
    left, right = values(stack.database, query)
    assert Asked(capsys, [left, "--diff", left, "--json"], 0).json["token"] is None
    found = Asked(capsys, [left, "--diff", right, "--json"], 1).json
    one, other = (steps_of(stack, episode)[0] for episode in (left, right))
    index = next(i for i, (a, b) in enumerate(zip(one.sampled_ids, other.sampled_ids, strict=False)) if a != b)
    assert found["common"] == len(one.prompt_ids) + index
    assert (found["token"]["step"], found["token"]["part"], found["token"]["index"]) == (0, "sampled", index)
    assert found["token"]["ids"] == [one.sampled_ids[index], other.sampled_ids[index]]
    assert all(found["token"]["texts"])
    said = Asked(capsys, [left, "--diff", right], 1).out
    assert f"first: step 0, sampled token {index}" in said
    assert f"episode {left}: {one.sampled_ids[index]} " in said


def episode_of(*turns: tuple[Sequence[int], Sequence[int]], **fields: Any) -> Episode:
    """An episode whose steps have these new and these sampled tokens."""
    steps = tuple(
        Step(i, (), tuple(new), tuple(said), (-1.0,) * len(said), "stop", Message("assistant", "x"), 0)
        for i, (new, said) in enumerate(turns)
    )
    return replace(Episode(Task("k", (), "")), steps=steps, **fields)


def test_diff_finds_end_of_shorter_episode() -> None:
    short, long = episode_of(([1, 2], [3])), episode_of(([1, 2], [3]), ([4], [5]))
    found = compare(short, long)
    assert found.token is not None
    assert (found.common, found.tokens, found.token.step, found.token.ids) == (3, (3, 5), 1, (None, 4))


def test_diff_compares_chains_in_any_order() -> None:
    def chained(*order: int) -> Episode:
        opened = episode_of(([1, 2], [3]))
        for place, which in enumerate(order, start=1):
            values = {"chain": place, "parent": 0, "shared": 2, "new_row": "other tools", "results": (ToolResult(str(which)),)}
            step = replace(opened.steps[0], index=place, prompt_ids=(which,), sampled_ids=(9,), **values)
            opened = replace(opened, steps=(*opened.steps, step))
        return opened

    assert compare(chained(4, 5), chained(5, 4)).same
    assert compare(chained(4, 5), chained(4, 5)).tokens == (11, 11), "each row with all that stands in it"
    found = compare(chained(4, 5, 6), chained(5, 7, 4))
    assert found.token is not None
    assert (found.token.step, found.token.part, found.token.index, found.token.ids) == (3, "prompt", 2, (6, 7))
    assert [(item.step, item.left, item.right) for item in found.results] == [(3, "6", "7")]
    elsewhere = replace(chained(4).steps[1], parent=0, shared=1)
    assert not compare(chained(4), replace(chained(4), steps=(chained(4).steps[0], elsewhere))).same, "it continues less"
    assert not compare(chained(4), chained()).same
    assert not compare(chained(), chained(4)).same


def test_diff_compares_results_rewards_and_endings() -> None:
    left = episode_of(([1], [2]), stop_reason="answered", reward=1.0, rewards={"right": 1.0})
    right = episode_of(([1], [2]), stop_reason="max_steps", reward=0.5, rewards={"right": 0.5, "short": 0.0})
    called = replace(left.steps[0], results=(ToolResult("4"),))
    found = compare(replace(left, steps=(called,)), right)
    assert found.token is None
    assert not found.same
    assert [(item.step, item.call, item.left, item.right) for item in found.results] == [(0, 0, "4", None)]
    assert found.rewards == (("right", 1.0, 0.5), ("short", None, 0.0), ("reward", 1.0, 0.5))
    assert found.stop_reasons == ("answered", "max_steps")


# --- tools and rewards without a run ----------------------------------------------------------------------------------------


def call_row(number: int, **fields: Any) -> Mapping[str, Any]:
    """A row of v_tool_calls."""
    known = {"tool": "echo", "arguments": {"x": str(number)}, "effects": "none", "error_class": None, "seconds": 0.0}
    return {"step": 0, "call": number, "kind": "call", **known, "result": str(number), **fields}


def test_check_tools_repeats_only_repeatable_calls() -> None:
    rows = [
        call_row(0),
        call_row(1, effects="once"),
        call_row(2, error_class="unknown_tool"),
        call_row(3, error_class="timeout", effects="repeatable"),
        call_row(4, result=None),
        call_row(5, effects="repeatable"),
        call_row(6, result="6", error_class="tool_error"),
        call_row(7, tool="pay"),
    ]
    ran: list[str] = []

    def run(tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        ran.append(arguments["x"])
        return ToolResult(arguments["x"])

    report = check_tools(episode_of(([1], [2])), rows, run, {"echo": "none", "pay": "once"}, lambda before: ())
    assert ran == ["0", "5", "6"]  # and not the payment, which has become `once` since
    assert report.taken == {"once": 2, "refused": 1, "timeout": 1, "unanswered": 1}
    assert (report.ran, report.differing) == (3, 1)
    assert report.first is not None
    assert report.first.call == 6  # the same text, but no error any more


def test_check_tools_leaves_inherited_calls_to_parent() -> None:
    asked = Message("assistant", "", tool_calls=(ToolCall("echo", {}),))
    fork = episode_of(([1], [2]), ([3], [4]), inherited=1, fork_step=1, parent_id=7)
    fork = replace(fork, steps=(replace(fork.steps[0], message=asked), fork.steps[1]))
    rows = [call_row(0, step=0), call_row(0, step=1)]
    report = check_tools(fork, rows, lambda tool, arguments: ToolResult("0"), {}, lambda before: ())
    assert (report.ran, report.prompts, report.taken, report.same) == (1, 1, {"parent's": 1}, True)


def no_run(tool: str, arguments: Mapping[str, Any]) -> ToolResult:
    """For episodes without calls."""
    raise AssertionError(tool)


def test_check_tools_compares_messages_as_stored() -> None:
    episode = episode_of(([1], [2]), ([3], [4]), ([5], [6]))
    said = (Message("tool", "4", name="echo" * 40), Message("user", "go on"))
    episode = replace(episode, steps=tuple(replace(step, prompt=said) for step in episode.steps))

    def reads(before: Episode) -> Sequence[Message]:
        return (Message("tool", "4", name=("echo" * 40)[:128]), said[1])[: 1 if len(before.steps) == 2 else 2]

    report = check_tools(episode, [], no_run, {}, reads)
    assert report.reading is not None
    assert (report.prompts, report.misread, report.same) == (3, 1, False)
    assert (report.reading.step, report.reading.index, report.reading.recorded, report.reading.found) == (2, 1, said[1], None)


def test_check_tools_reports_env_that_raises() -> None:
    def reads(before: Episode) -> Sequence[Message]:
        raise KeyError("state")

    report = check_tools(episode_of(([1], [2])), [], no_run, {}, reads)
    assert report.reading is not None
    assert (report.misread, report.same, report.reading.found) == (1, False, "KeyError: 'state'")


def raising(episode: Episode) -> float:
    """A reward that cannot be computed any more."""
    raise OSError("the answers are away")


def test_check_rewards_reports_reward_that_raises() -> None:
    named = {f"{__name__}:raising": 1.0}
    report = check_rewards(episode_of(([1], [2])), "default", Env(), named, named, "")
    assert not report.same
    assert "the answers are away" in report.error
