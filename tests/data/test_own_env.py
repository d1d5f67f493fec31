"""An env of one's own, the one that the manual shows: named by its path, it plays whole episodes, and goes on after a crash."""

import inspect
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workers.requests.submit import prepare
from agentrl.workflow import envs
from agentrl.workflow.agent import Action, CallTools, Finish, Generate, next_action
from agentrl.workflow.config import RolloutConfig, build
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.envs import Env, score_episode, scoring_hash
from agentrl.workflow.errors import RewardError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.plugins import find, names
from agentrl.workflow.rewards import code_hash
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.trajectory import Episode, Message, PolicyRef, Task, ToolResult
from tests.data.test_datasets import write
from tests.rewards.test_code import box as box
from tests.support.played_runs import EXPIRED, claim, submission, value, values
from tests.support.played_runs import step as turn
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_random
from tests.workers.test_workers import in_memory as in_memory

CHAT = chat()


def manual() -> str:
    """The example in the manual of envs."""
    lines = inspect.cleandoc(envs.__doc__ or "").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    ") or not line)


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Env:
    """The manual's env, from a file of one's own."""
    (tmp_path / "guess.py").write_text(manual())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    made: Env = find("envs", "guess:guess")
    return made


class Player:
    """Claims the run's only group as if its last worker were lost; the policy says these words, whoever's turn it is."""

    def __init__(self, db: Database, group: int, words: Sequence[str]) -> None:
        self.heard: list[tuple[int, ...]] = []
        said = iter([CHAT.turn(Message("assistant", word)) for word in words])

        def says(request: GenerateRequest) -> Sequence[int]:
            self.heard.append(request.prompt_ids)
            return next(said)

        work = claim(db, group, lease=EXPIRED)
        made, engine = Experiment.load(work.config, work.weights), ScriptedEngine(says, workers=1)
        self.driver = GroupRollout(db, work, made, engine, CHAT, SimpleQueue(), set())
        self.driver.start()

    def takes(self, turns: int) -> "Player":
        """So many turns come and are committed."""
        for _ in range(turns):
            self.driver.handle([self.driver.inbox.get(timeout=60)])
        return self


@pytest.fixture
def group(own_database: Database, in_memory: None, guess: Env, tmp_path: Path) -> int:
    """The only group of a run in that env, submitted by its path; at most four turns."""
    file = write(tmp_path / "numbers.jsonl", {"question": "?", "answer": "13"})
    asked = {"dataset.name": str(file), "env": "guess:guess", "model.path": str(tiny_random(tmp_path / "model"))}
    limits = {"rollout.max_steps": 4, "rollout.group_size": 2, "epochs": 1}
    made = planning.submit(own_database, prepare(own_database, build({**asked, **limits})).submission)
    (found,) = planning.start_iteration(own_database, planning.open_iterations(own_database, made.id)[0])
    return found


def played(db: Database) -> list[Episode]:
    return [episode_rows.find_episode(db, number).episode for number in values(db, "SELECT id FROM episodes ORDER BY id")]


def told(episode: Episode) -> list[str]:
    """What each turn read."""
    return [message.content for step in episode.steps for message in step.prompt]


FIRST = "Guess my number, from 1 to 20. Say nothing but a number."


def test_own_env_continues_episode_while_it_has_messages(own_database: Database, group: int) -> None:
    Player(own_database, group, ["5", "20", "9", "1", "13", "2", "3"]).takes(7)
    won, lost = played(own_database)
    assert (told(won), won.stop_reason) == ([FIRST, "higher", "higher"], "answered")
    assert (told(lost), lost.stop_reason) == ([FIRST, "lower", "higher", "higher"], "max_steps")
    assert (won.reward, lost.reward) == (1 / 3 + 0.1, 0.1)
    query = "SELECT part || ' ' || weight FROM rewards ORDER BY id"
    assert values(own_database, query) == ["format 0.1", "guessed 1.0"] * 2


def test_own_env_repeats_its_messages_to_next_worker(own_database: Database, group: int) -> None:
    first = Player(own_database, group, ["5", "20", "9", "1", "2"]).takes(3)
    for _ in range(2):  # two more turns are sampled, and nobody records them
        first.driver.inbox.get(timeout=60)
    heir = Player(own_database, group, ["13", "1", "13"]).takes(3)
    assert heir.heard[:2] == [first.heard[4], first.heard[3]]
    assert [told(episode) for episode in played(own_database)] == [[FIRST, "higher", "higher"], [FIRST, "lower", "higher"]]
    assert {episode.stop_reason for episode in played(own_database)} == {"answered"}


def test_own_env_messages_and_rewards_are_verified(
    own_database: Database, group: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Player(own_database, group, ["5", "13", "13"]).takes(3)
    number = str(value(own_database, "SELECT min(id) FROM episodes"))
    found: dict[str, Any] = {}
    for what in ("tools", "rewards"):
        assert main(["replay", number, "--verify", what, "--json"]) == 0
        found |= json.loads(capsys.readouterr().out)
    assert (found["tools"]["prompts"], found["tools"]["misread"]) == (2, 0)
    (report,) = found["rewards"]
    assert (report["parts"], report["hooks"], report["same_code"], report["same"]) == (2, [], True, True)


# --- what it may not do -------------------------------------------------------------------------------------------------------


class Own(Env):
    """Gives what it was made with."""

    given: Any = None

    def final_reward(self, episode: Episode) -> Any:
        """That."""
        return self.given


class Raising(Env):
    """Cannot say."""

    def final_reward(self, episode: Episode) -> Any:
        """Raises."""
        raise SystemExit("no")


class Word(Own):
    """No number."""

    given: Any = {"bonus": "much"}  # noqa: RUF012


class NotANumber(Own):
    """Nothing divided by nothing."""

    given: Any = {"bonus": float("nan")}  # noqa: RUF012


class Twice(Own):
    """A part that a reward has already."""

    given: Any = {"format": 1.0}  # noqa: RUF012


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (Own(), "Own.final_reward raised AttributeError"),
        (Raising(), "Raising.final_reward raised SystemExit: no"),
        (Word(), "a reward must be a number, not 'str'"),
        (NotANumber(), "returned nan for 'bonus'"),
        (Twice(), "returned a part named 'format', which is also the name of a reward of this env"),
    ],
)
def test_own_env_without_reward_is_error(env: Env, why: str) -> None:
    ended = Episode(Task("t", (), "1"), steps=(turn(),), status="done", stop_reason="answered")
    with pytest.raises(RewardError, match=why):
        score_episode(env, ended, {"format": 1.0})


def test_own_env_code_is_part_of_scoring_hash(guess: Env) -> None:
    assert scoring_hash(Env(), {"format": 1.0}) == code_hash({"format": 1.0})
    assert scoring_hash(guess, {"format": 1.0}) not in (code_hash({"format": 1.0}), scoring_hash(Twice(), {"format": 1.0}))


class Forgetful(Env):
    """Does not say what comes next."""

    def step(self, episode: Episode) -> Any:
        """Nothing at all."""


def test_own_env_step_without_return_does_not_end_episode() -> None:
    episode = Episode(Task("t", (), "1"), steps=(turn(),))
    with pytest.raises(TypeError):
        next_action(episode, Forgetful(), RolloutConfig())


# --- the shipped ones, twice --------------------------------------------------------------------------------------------------

DATASETS = {"math": "arithmetic", "code": "code_tiny"}
"""Env -> the dataset whose demonstrations are played in it, where that is not of its name."""


def lived(env: Env, task: Task, said: Sequence[Message]) -> list[Action]:
    """All that happens in the env to a policy that says this, its tools really called."""
    words = iter(said)
    episode, actions = Episode(task), []
    tools = env.toolset()
    while not isinstance(action := next_action(episode, env, RolloutConfig()), Finish):
        actions.append(action)
        if isinstance(action, Generate):
            made = replace(turn(len(episode.steps)), prompt=action.messages, message=next(words))
        else:
            asked = (CallWork(1, "env", call.name, call.arguments, "none") for call in action.step.message.tool_calls)
            results = (run_tool(tools[work.tool], work) for work in asked)
            made = replace(action.step, results=tuple(ToolResult(result.content, result.error_class) for result in results))
        episode = episode.with_step(made)
    return [*actions, action]


@pytest.mark.parametrize("name", sorted({*names("envs")} - {"plain"}))  # which has no world: no tools, no dataset
def test_shipped_env_is_repeatable(name: str, request: pytest.FixtureRequest) -> None:
    env: Env = find("envs", name)
    dataset = find("datasets", DATASETS.get(name, name))
    if "python" in env.toolset():
        request.getfixturevalue("box")
    tasks = list(islice(dataset.load("train"), 3))
    for task, conversation in zip(tasks, dataset.demonstrations(tasks, 0), strict=True):
        said = [message for message in conversation if message.role == "assistant"]
        first, second = lived(env, task, said), lived(env, task, said)
        assert first == second
        assert first[-1] == Finish("answered")
        assert len([action for action in first if isinstance(action, CallTools)]) == sum(bool(m.tool_calls) for m in said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"env": "not_here:env"}, "The chat continues without the run's env: 'not_here:env' (envs)"),
        ({"env": "math", "tools": ["not_here:tool"]}, "The chat continues without a tool: 'not_here:tool' (tools)"),
    ],
)
def test_chat_works_without_env_and_tools_of_run(
    own_database: Database,
    tmp_path: Path,
    config: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = submission("own")
    model = tiny_random(tmp_path / "model")
    ref = PolicyRef(str(model), base_hash(model))
    planning.submit(own_database, replace(wanted, config={**wanted.config, **config}, policy=ref))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 plus 2?\n"))
    assert main(["chat", "--policy", "own", "--max-new-tokens", "4"]) == 0
    told = capsys.readouterr()
    assert said in told.err
    assert told.out.strip()
    assert main(["chat", "--policy", "own", "--env", "not_here:env"]) == 2, "an env that a person names is needed"
