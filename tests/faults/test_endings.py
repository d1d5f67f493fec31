"""How a turn may end: with its end token, with a stop string, at a limit, with nothing said; and what follows it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from agentrl.cli.conversation import Talk
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workflow import engines
from agentrl.workflow.config import ModelConfig, RolloutConfig, RunConfig, build
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.engines.rolling import rolling
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference.open_policy import OpenPolicy
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.training.training_rows import rows_of
from agentrl.workflow.trajectory import Episode, Group, Message, PolicyRef, Step, Task
from tests.chat.test_rendering import SCHEMA
from tests.support.played_runs import CALL, EXPIRED, claim, start, submission, value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_random
from tests.workers.test_workers import answer
from tests.workers.test_workers import in_memory as in_memory

CHAT = chat()
ASK = CHAT.turn(Message("assistant", "", tool_calls=(CALL.call,)))
ASK_UNENDED = ASK[:-1]
"""A call whose closing tag was a stop string."""
ANSWER = CHAT.turn(Message("assistant", "#### 42"))
HOW: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "stop": ["</tool_call>", "é"]}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tiny_random(tmp_path_factory.mktemp("base"))
    return Policy.load(ModelConfig.model_validate({"path": str(folder), "lora_r": 0}), str(folder), "cpu", 1)


def group_of(db: Database, **rollout: Any) -> int:
    """The group of two episodes of a new run that samples in that way."""
    wanted = submission(tasks=1)
    config = build(RunConfig.model_validate(wanted.config).flat() | {f"rollout.{key}": how for key, how in rollout.items()})
    (group,) = start(db, replace(wanted, config=config.model_dump(mode="json")))
    return group


class Worker:
    """Claims the group and drives it; its policy says the turns one after the other, and it remembers what was asked."""

    def __init__(self, db: Database, group: int, turns: Sequence[Sequence[int]]) -> None:
        self.requests: list[GenerateRequest] = []
        self._turns = iter(turns)
        work = claim(db, group, lease=EXPIRED)
        made = Experiment.load(work.config, work.weights)
        engine = ScriptedEngine(self._turn, workers=1)
        self.driver = GroupRollout(db, work, made, engine, CHAT, SimpleQueue(), set())
        self.driver.start()

    def _turn(self, request: GenerateRequest) -> Sequence[int]:
        self.requests.append(request)
        return next(self._turns)

    def takes(self, turns: int) -> "Worker":
        """So many turns come and are committed."""
        for _ in range(turns):
            self.driver.handle([self.driver.inbox.get(timeout=60)])
        return self


def episodes(db: Database) -> list[Episode]:
    return [episode_rows.find_episode(db, episode).episode for episode in values(db, "SELECT id FROM episodes ORDER BY id")]


# --- a turn that a stop string ended ------------------------------------------------------------------------------------------


def test_turn_without_end_token_gets_it_in_next_prompt() -> None:
    heard = [Message("tool", "42", name="calculator")]
    ended, unended = (CHAT.continuation(heard, [SCHEMA], said)[0] for said in (ASK, ASK_UNENDED))
    assert ended is not None
    assert unended is not None
    assert ASK + ended == ASK_UNENDED + unended
    asked = Message("user", "What is 6*7?")
    messages = [asked, Message("assistant", "", tool_calls=(CALL.call,)), *heard]
    row = CHAT.opening([asked], [SCHEMA]) + ASK_UNENDED + unended
    assert CHAT.decode(row) == CHAT.decode(CHAT.opening(messages, [SCHEMA]))


def test_episode_continues_stored_tokens_and_end_is_untrained(sqlite: Database, in_memory: None) -> None:
    group = group_of(sqlite, **HOW)
    first = Worker(sqlite, group, [ASK_UNENDED] * 2).takes(2)
    answer(sqlite, first.driver)  # it asks for the second turn, and dies
    before = episodes(sqlite)
    heir = Worker(sqlite, group, [ANSWER] * 2).takes(2)
    for request, episode in zip(heir.requests, before, strict=True):
        stored = episode.context_ids
        assert request.prompt_ids[: len(stored)] == stored
        assert request.prompt_ids[len(stored)] == ASK[-1]
        assert request.position == 0
    for episode in episodes(sqlite):
        assert (episode.stop_reason, [step.finish_reason for step in episode.steps]) == ("answered", ["stop", "stop"])
        (row,) = rows_of([episode])
        assert sum(row.action_mask) == len(ASK_UNENDED) + len(ANSWER)
        assert [i for i, own in zip(row.input_ids, row.action_mask, strict=True) if own] == [*ASK_UNENDED, *ANSWER]
        assert CHAT.decode(row.input_ids).count("</tool_call><|im_end|>\n") == 1
    assert set(values(sqlite, "SELECT finish_reason FROM v_steps")) == {"stop"}
    assert value(sqlite, "SELECT count(*) FROM v_steps WHERE new_row IS NOT NULL") == 0


def test_sampling_options_are_the_same_after_interruption(sqlite: Database) -> None:
    group = group_of(sqlite, **HOW)
    first = Worker(sqlite, group, [ANSWER] * 2)
    for _ in range(2):
        first.driver.inbox.get(timeout=60)  # sampled, and lost before it was committed
    heir = Worker(sqlite, group, [ANSWER] * 2).takes(2)
    assert heir.requests == first.requests
    for request in heir.requests:
        said = (request.temperature, request.top_k, request.top_p, request.min_p, request.stop)
        assert said == (0.7, 9, 0.9, 0.05, ("</tool_call>", "é"))
    assert {episode.stop_reason for episode in episodes(sqlite)} == {"answered"}


def test_stop_string_within_call_ends_episode(sqlite: Database) -> None:
    cut = CHAT.tokenizer.encode('<tool_call>\n{"name": "calc', add_special_tokens=False)
    Worker(sqlite, group_of(sqlite, stop=["calc"]), [cut] * 2).takes(2)
    assert {episode.stop_reason for episode in episodes(sqlite)} == {"parse_error"}


@pytest.fixture
def talk(policy: Policy) -> Iterator[Talk]:
    ref = PolicyRef(str(policy.folder), policy.base_hash)
    limits = RolloutConfig(max_new_tokens=64, top_k=9, stop=("</tool_call>",))
    made = Talk(OpenPolicy(policy, ref, limits), find("envs", "arithmetic"))
    yield made
    made.close()


def test_stop_string_ends_turn_but_not_conversation(talk: Talk) -> None:
    asked: list[GenerateRequest] = []
    turns = iter([ASK_UNENDED, ANSWER, ANSWER])

    def says(request: GenerateRequest) -> Sequence[int]:
        asked.append(request)
        return next(turns)

    talk.policy.engine.close()
    talk.policy.engine = ScriptedEngine(says, workers=1)
    assert "42" in "".join(text for text, _ in talk.answer("What is 6*7?"))
    list(talk.answer("Once more?"))
    first, second, third = (request.prompt_ids for request in asked)
    assert second[: len(first) + len(ASK)] == first + ASK
    assert third[: len(second) + len(ANSWER)] == second + ANSWER
    assert third[len(second) + len(ANSWER)] != ANSWER[-1]
    assert {(request.top_k, request.stop) for request in asked} == {(9, ("</tool_call>",))}


# --- turns with nothing in them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [(), ANSWER[-1:]], ids=["no token", "the end token alone"])
def test_empty_turn_is_no_answer(sqlite: Database, said: Sequence[int]) -> None:
    Worker(sqlite, group_of(sqlite), [said] * 2).takes(2)
    for episode in episodes(sqlite):
        assert (episode.status, episode.stop_reason, episode.final_answer, episode.reward) == ("done", "answered", "", 0.0)


def test_question_beyond_model_window_ends_episode(sqlite: Database, policy: Policy) -> None:
    wanted = submission(tasks=1)
    long = replace(wanted.tasks[0], messages=(Message("user", "7 " * policy.max_context),))
    (group,) = start(sqlite, replace(wanted, tasks=[long]))
    work = claim(sqlite, group)
    work = replace(work, policy=PolicyRef(str(policy.folder), policy.base_hash))
    engine = RollingEngine(policy)
    driver = GroupRollout(sqlite, work, Experiment.load(work.config, work.weights), engine, policy.chat, SimpleQueue(), set())
    driver.start()
    for _ in range(2):
        driver.handle([driver.inbox.get(timeout=60)])
    engine.close()
    for episode in episodes(sqlite):
        assert (episode.status, episode.stop_reason, episode.sampled_count) == ("done", "max_tokens", 0)
        assert episode.steps[0].finish_reason == "length"


def test_empty_turn_trains_nothing_but_others_do(policy: Policy) -> None:
    empty = Step(0, (), (5, 6, 7), (), (), "length", Message("assistant", ""), 0)
    said = replace(empty, sampled_ids=(8, 9), behavior_logprobs=(-4.0, -4.0), finish_reason="stop")
    task = Task("train/0", (), "")
    silent = Episode(task, steps=(empty,), status="done", reward=0.0, id=0)
    spoken = Episode(task, steps=(said,), status="done", reward=1.0, id=1)
    assert [row.episode for row in rows_of([silent, spoken])] == [1]
    run = build({"model.lora_r": 0})
    assert Trainer(policy, run).update([Group(task, (silent, spoken))], 0).metrics["rows"] == 1
    nothing = Trainer(policy, run).update([Group(task, (silent, replace(silent, id=2, reward=1.0)))], 0)
    assert nothing.skipped is not None
    assert not nothing.bad


# --- what an engine does not know ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "given"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1), ("stop", ("x",))])
def test_sampling_option_unsupported_by_engine_is_refused(key: str, given: object) -> None:
    config = build({f"rollout.{key}": given})
    engines.check(rolling, config, trains=True)
    poorer = replace(rolling, options=rolling.options - {key})
    engines.check(poorer, build({}), trains=True)
    with pytest.raises(ConfigError, match=f"does not know rollout.{key}"):
        engines.check(poorer, config, trains=True)


def test_chat_names_limit_that_cut_turn(talk: Talk, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    listener = logging.Handler()
    monkeypatch.setattr(listener, "emit", lambda record: heard.append(record.getMessage()))
    monkeypatch.setattr(policy.tokenizer, "model_max_length", policy.max_context)
    logging.getLogger("transformers").addHandler(listener)
    try:
        told = [text for text, _ in talk.answer("again " * policy.max_context)]
    finally:
        logging.getLogger("transformers").removeHandler(listener)
    assert told[-1] == f"(cut at the model's window of {policy.max_context} tokens)"
    assert heard == []
    talk.reset()
    talk.policy.engine.close()
    talk.policy.engine = ScriptedEngine(lambda request: ANSWER[:1] * (request.max_new_tokens + 1), workers=1)
    assert [text for text, _ in talk.answer("And now?")][-1] == "(cut at --max-new-tokens)"
