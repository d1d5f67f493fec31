"""Forks, training on stored groups, new rewards over old episodes, and the ledger: on one real run with two turns and tools."""

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.cli.follow import load_view, summary
from agentrl.workers.jobs import rollout as worker
from agentrl.workers.requests.fork_request import OTHER_CODE, ForkRequest, prepare_fork
from agentrl.workers.requests.rescoring import rescore
from agentrl.workers.requests.stored_groups import prepare_stored
from agentrl.workers.stack import embedded
from agentrl.workflow.agent import QUESTION
from agentrl.workflow.config import CriticConfig, build
from agentrl.workflow.errors import ConfigError, ConflictError, NotFoundError, RewardError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find
from agentrl.workflow.resolve import resolve
from agentrl.workflow.store import train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import find_episode_counted_twice, load_stored_run
from agentrl.workflow.store.reads import episode_rows, ledger
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.training.training_rows import rows_of
from agentrl.workflow.trajectory import Episode
from bench.faults.fork_server import Nursery
from tests.support.forked_stack import forked_stack
from tests.support.played_runs import claim, ready, start, submission, update_of
from tests.support.real_stack import Stack, embedded_stack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]

RUN = "origin"


@pytest.fixture(scope="module")
def stack(module_folder: Path, forks: Nursery, world_model: Path, migrated_file: Path) -> Iterator[Stack]:
    """A stack with one finished run of 2 iterations x 2 groups x 2 episodes x 2 turns."""
    with forked_stack(module_folder, forks, migrated_file) as made:
        made.agentrl("submit", *asked(world_model), "--name", RUN, "--wait")
        yield made


def asked(model: Path) -> tuple[str, ...]:
    """Flags of the run."""
    return (
        "--dataset", "bench.faults.world:tasks", "--env", "bench.faults.world:world", "--model", str(model), "--epochs", "1",
        "--max-tasks", "4", "--tasks-per-iteration", "2", "--group-size", "2", "--max-steps", "2", "--max-new-tokens", "24",
        "-s", "hooks=[bench.faults.world:Chance]",
    )  # fmt: skip


def select(stack: Stack, query: str, **values: Any) -> list[Any]:
    """Rows of the database."""
    with stack.database.read() as tx:
        return list(tx.execute(text(query), values).mappings())


def episode_of(stack: Stack, number: int) -> Episode:
    """The episode with all its steps."""
    return episode_rows.find_episode(stack.database, number).episode


def two_steps(stack: Stack) -> int:
    """An episode of the run that has two steps."""
    return int(select(stack, "SELECT min(id) AS id FROM v_episodes WHERE run = :run AND steps = 2", run=RUN)[0]["id"])


def forked(stack: Stack, *options: str) -> tuple[str, list[Episode]]:
    """Forks, waits, and gives the run's name with its episodes."""
    name = stack.agentrl("fork", *options, "--wait").strip()
    rows = select(stack, "SELECT id FROM v_episodes WHERE run = :run ORDER BY id", run=name)
    return name, [episode_of(stack, row["id"]) for row in rows]


def test_fork_shares_first_steps_and_samples_the_rest(stack: Stack) -> None:
    parent = episode_of(stack, two_steps(stack))
    before = select(stack, "SELECT count(*) AS steps FROM steps WHERE episode_id = :id", id=parent.id)
    name, children = forked(stack, str(parent.id), "--step", "1", "-n", "4")
    assert len(children) == 4
    assert all(child.steps[0] == parent.steps[0] for child in children)
    assert {child.steps[1].prompt_ids for child in children} == {parent.steps[1].prompt_ids}
    assert len({child.steps[1].sampled_ids for child in children}) > 1
    assert all(child.status == "done" and child.reward is not None for child in children)
    stored = select(stack, "SELECT e.steps, count(s.id) AS own FROM episodes e JOIN steps s ON s.episode_id = e.id "
                    "WHERE e.run_id = (SELECT id FROM runs WHERE name = :run) GROUP BY e.id, e.steps", run=name)  # fmt: skip
    assert all(row["steps"] == row["own"] == 1 for row in stored)
    assert select(stack, "SELECT count(*) AS steps FROM steps WHERE episode_id = :id", id=parent.id) == before
    assert select(stack, "SELECT kind, status FROM v_groups WHERE run = :run", run=name) == [{"kind": "fork", "status": "done"}]


def test_fork_prefix_does_not_train(stack: Stack) -> None:
    parent = episode_of(stack, two_steps(stack))
    _, (child,) = forked(stack, str(parent.id), "--step", "1", "-n", "1")
    (row,) = rows_of([child])
    first, second = child.steps
    assert sum(row.action_mask) == len(first.sampled_ids) + len(second.sampled_ids)
    assert sum(row.loss_mask) == len(second.sampled_ids)
    assert not any(row.loss_mask[: len(first.prompt_ids) + len(first.sampled_ids)])


def test_fork_of_same_step_again_draws_other_tokens(stack: Stack) -> None:
    parent = str(two_steps(stack))
    _, some = forked(stack, parent, "--step", "0", "-n", "2")
    _, others = forked(stack, parent, "--step", "0", "-n", "2")
    assert len({child.sample for child in (*some, *others)}) == 4
    assert len({child.steps[0].sampled_ids for child in (*some, *others)}) > 1


def test_fork_samples_with_policy_of_its_step_by_default(stack: Stack) -> None:
    late = "SELECT max(id) AS id FROM v_episodes WHERE run = :run AND steps = 2 AND iteration = 2"
    parent = str(select(stack, late, run=RUN)[0]["id"])
    _, (child,) = forked(stack, parent, "--step", "1", "-n", "1")
    assert child.steps[1].policy_version == 1
    _, (other,) = forked(stack, parent, "--step", "1", "-n", "1", "--policy", "2")
    assert other.steps[1].policy_version == 2
    assert other.steps[0].policy_version == 1


def test_fork_reads_edited_message(stack: Stack) -> None:
    parent = episode_of(stack, two_steps(stack))
    _, children = forked(stack, str(parent.id), "--step", "1", "-n", "2", "--edit-message", "7")
    assert [message.content for message in parent.steps[1].prompt[1:]] == [QUESTION.content], (
        "two turns: the second is the last"
    )
    assert all([message.content for message in child.steps[1].prompt] == ["7", QUESTION.content] for child in children)
    assert all(child.steps[1].prompt_ids != parent.steps[1].prompt_ids for child in children)
    shown = stack.agentrl("replay", str(children[0].id))
    assert "forked from" in shown
    assert "tool (edited):\n    7" in shown
    _, (grandchild,) = forked(stack, str(children[0].id), "--step", "1", "-n", "1", "--policy", RUN)
    assert grandchild.steps[1].prompt == children[0].steps[1].prompt
    assert grandchild.steps[1].policy_version == 2
    assert len(json.loads(stack.agentrl("replay", str(children[0].id), "--json"))["steps"]) == 2


def test_fork_of_fork_reads_through_both(stack: Stack) -> None:
    parent = episode_of(stack, two_steps(stack))
    _, (child,) = forked(stack, str(parent.id), "--step", "1", "-n", "1")
    _, (grandchild,) = forked(stack, str(child.id), "--step", "1", "-n", "1")
    assert grandchild.steps[0] == parent.steps[0]
    assert grandchild.parent_id == child.id


def test_fork_refusal_gives_reason(stack: Stack) -> None:
    parent = two_steps(stack)
    for request, refusal in (
        (ForkRequest(999999, 0, 1), NotFoundError),
        (ForkRequest(parent, 7, 1), NotFoundError),
        (ForkRequest(parent, 0, 1, policy="77"), NotFoundError),
        (ForkRequest(parent, 0, 1, policy="what"), NotFoundError),
        (ForkRequest(parent, 0, 1, policy=f"{RUN}@\u00b3"), ConfigError),
        (ForkRequest(parent, 1, 1, edit="7", with_parent=True), ConfigError),
    ):
        with pytest.raises(refusal):
            prepare_fork(stack.database, request)
    stack.agentrl("fork", str(parent), "--step", "0", "-n", "2", "--name", RUN, code=3)


def test_stored_groups_may_exceed_bind_limit_of_database(database: Database) -> None:
    start(database, submission())
    groups = range(1, 40_000)
    assert find_episode_counted_twice(database, groups) is None
    assert load_stored_run(database, find_run(database, "first")["id"], groups, "default", 2).planned == len(groups)


def test_stored_fork_groups_train_with_parent_as_sibling(stack: Stack) -> None:
    parent = episode_of(stack, two_steps(stack))
    name, children = forked(stack, str(parent.id), "--step", "1", "-n", "3", "--with-parent")
    stand_in = children[-1]
    assert stand_in.steps == parent.steps
    assert stand_in.reward == parent.reward
    with pytest.raises(ConfigError, match="trained on twice"):
        prepare_stored(stack.database, *resolve(flags={"source.runs": [name, RUN]}))
    trained = stack.agentrl("submit", "--from-groups", name, "--learning-rate", "0.01", "--wait").strip()
    used = select(
        stack, "SELECT episode_id, advantage FROM consumptions JOIN runs r ON r.id = run_id WHERE r.name = :run", run=trained
    )
    assert {row["episode_id"] for row in used} == {child.id for child in children}
    assert sum(row["advantage"] for row in used) == pytest.approx(0, abs=1e-6)
    assert select(stack, "SELECT count(*) AS n FROM v_episodes WHERE run = :run", run=trained) == [{"n": 0}]
    assert [row["kind"] for row in select(stack, POLICIES, run=trained)] == ["base", "trained"]


POLICIES = "SELECT p.kind FROM policies p JOIN runs r ON r.id = p.run_id WHERE r.name = :run ORDER BY version"


def shorter(episode: Episode) -> float:
    """Prefers few tokens."""
    return -float(sum(len(step.sampled_ids) for step in episode.steps)) - 0.01 * episode.sample


def broken(episode: Episode) -> float:
    """Never works."""
    raise ValueError("no idea")


def test_rescored_rewards_stand_beside_old_and_train(stack: Stack) -> None:
    old = select(stack, "SELECT id, reward FROM v_episodes WHERE run = :run ORDER BY id", run=RUN)
    said = json.loads(
        stack.agentrl("rescore", RUN, "--reward", "tests.store.test_forks:shorter=2", "--name", "short", "--json")
    )
    assert (said["episodes"], said["reward_set"]) == (8, "short")
    assert select(stack, "SELECT id, reward FROM v_episodes WHERE run = :run ORDER BY id", run=RUN) == old
    scores = select(stack, "SELECT value, weight FROM v_rewards WHERE run = :run AND reward_set = 'short'", run=RUN)
    assert len(scores) == 8
    assert sum(row["value"] * row["weight"] for row in scores) / 8 == pytest.approx(said["mean"])
    transcript = stack.agentrl("replay", str(old[0]["id"]))
    assert "tests.store.test_forks:shorter: " in transcript
    assert transcript.count("(reward set short)") == 1
    trained = stack.agentrl("submit", "--from-episodes", RUN, "--reward-set", "short", "--wait").strip()
    (command,) = [line.strip() for line, _ in summary(load_view(stack.database, trained)) if "v_ledger" in line]
    assert stack.agentrl(*shlex.split(command)[1:]).count("trained") == 8
    assert select(stack, "SELECT id FROM v_episodes WHERE run = :run", run=trained) == []
    with stack.database.engine.begin() as tx:  # as if a group had ended after the rescoring
        mine = "episode_id IN (SELECT id FROM episodes WHERE group_id = 1)"
        tx.execute(
            text(f"DELETE FROM rewards WHERE {mine} AND reward_set_id IN (SELECT id FROM reward_sets WHERE name = 'short')")
        )
    partly = prepare_stored(stack.database, *resolve(flags={"source.runs": [RUN], "source.reward_set": "short"}))
    assert len(partly.submission.groups) == 3
    assert "3 of its 4 groups" in partly.remarks[0]
    iterations = select(
        stack, "SELECT status, episodes, trainable, mean_reward FROM v_iterations WHERE run = :run", run=trained
    )
    assert [(row["status"], row["episodes"], row["trainable"]) for row in iterations] == [("done", 8, 8)]
    assert iterations[0]["mean_reward"] == pytest.approx(said["mean"])
    assert len(select(stack, "SELECT id FROM v_updates WHERE run = :run", run=trained)) == 1


def test_sft_and_dpo_models_of_a_run_can_be_trained(stack: Stack) -> None:
    best = json.loads(stack.agentrl("sft", "--from-episodes", RUN, "--best", "1", "--steps", "2", "--json"))
    assert (best["examples"], best["of"]) == (4, 8)
    paired = json.loads(stack.agentrl("dpo", "--from-episodes", RUN, "--steps", "4", "--reference", "sampler", "--json"))
    differing = "SELECT group_id FROM episodes JOIN runs ON runs.id = run_id WHERE name = :run GROUP BY group_id"
    mixed = len(select(stack, f"{differing} HAVING min(reward) < max(reward)", run=RUN))
    assert 0 < mixed == paired["examples"] == paired["groups"]
    assert paired["of"] == 4
    for made in (best, paired):
        plan = json.loads(stack.agentrl("submit", *asked(Path(made["model"])), "--dry-run", "--json"))
        assert plan["model"] == made["model"]
    assert select(stack, "SELECT DISTINCT stage FROM consumptions") == [{"stage": "train"}]


def test_rescore_with_exception_or_taken_name_writes_nothing(stack: Stack) -> None:
    with pytest.raises(RewardError, match="no idea"):
        rescore(stack.database, RUN, ["tests.store.test_forks:broken"], None)
    assert select(stack, "SELECT id FROM reward_sets WHERE name = 'broken'") == []
    assert rescore(stack.database, RUN, ["format"], "twice") == rescore(stack.database, RUN, ["format"], "twice")
    with pytest.raises(ConflictError):
        rescore(stack.database, RUN, ["format=3"], "twice")
    with pytest.raises(ConfigError, match="named twice"):
        rescore(stack.database, RUN, ["format", "format=2"], None)
    for wrong in ("no_such_reward", "format=nan", "format=much"):
        with pytest.raises(ConfigError):
            rescore(stack.database, RUN, [wrong], None)


def test_critic_options_can_change_for_stored_episodes(own_database: Database, home: Path) -> None:
    work = ready(own_database, submission())
    train_commits.commit_update(own_database, work, update_of(work), 3)

    def critic_of(**flags: Any) -> CriticConfig:
        return prepare_stored(own_database, *resolve(flags={"source.runs": ["first"], **flags})).config.critic

    ppo = {"algorithm.name": "ppo"}
    assert critic_of(**ppo, **{"critic.warmup": 2}).warmup == 2
    with own_database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET config = json_set(config, '$.critic.warmup', 3)"))
    assert [critic_of(), critic_of(**ppo)] == [CriticConfig(), CriticConfig()], "not that of who made the episodes"


def test_rollout_options_cannot_change_for_stored_episodes(stack: Stack) -> None:
    stored = {"source.runs": [RUN]}
    for flags, refusal in (
        (stored | {"rollout.temperature": 0.5}, ConfigError),
        (stored | {"epochs": 2}, ConfigError),
        (stored | {"source.reward_set": "unknown"}, NotFoundError),
        ({"source.groups": [999999]}, NotFoundError),
        ({"source.groups": [10**20]}, ConfigError),
    ):
        with pytest.raises(refusal):
            prepare_stored(stack.database, *resolve(flags=flags))
    stack.agentrl("submit", "--dataset", "arithmetic", "--reward-set", "short", code=2)


def test_ledger_explains_each_episode_and_sums_to_plan(stack: Stack) -> None:
    chosen = two_steps(stack)
    told = json.loads(stack.agentrl("why", str(chosen), "--json"))
    assert told["fate"] == "trained"
    assert told["advantage"] != 0
    assert "trained: advantage" in stack.agentrl("why", str(chosen))
    for run in {row["run"] for row in select(stack, "SELECT DISTINCT run FROM v_ledger")}:
        table = ledger.count_fates(stack.database, run)
        assert table
        for row in table:
            assert sum(row[fate] for fate in ledger.FATES) == row["planned"]
    stack.agentrl("why", "999999", code=5)


def test_worker_refuses_group_if_reward_file_was_edited(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, weights = tmp_path / "edited_since.py", {"edited_since:mine": 1.0}
    file.write_text("def mine(episode): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker, "database", lambda: database)
    made = Experiment(build({"env": "math"}), weights)
    find("rewards", "edited_since:mine")
    wanted = replace(submission(), weights=weights, code_hash=made.scoring_hash())
    work = claim(database, start(database, wanted)[0])
    worker._check_code(work, made)
    file.write_text("def mine(episode): return 22.0\n")
    worker._check_code(work, made)
    later = replace(work, code_hash=made.scoring_hash(anew=True))
    assert later.code_hash != work.code_hash
    with pytest.raises(ConfigError, match="A file of the rewards of first has changed since the running workers read it"):
        worker._check_code(later, made)


def test_worker_with_older_reward_code_does_not_score(
    short_folder: Path, world_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = short_folder / "own"
    own.mkdir()
    monkeypatch.syspath_prepend(str(own))
    flags = (*asked(world_model), "--max-tasks", "2", "--reward", "edited_rewards:mine", "--wait")
    first = None
    with embedded_stack(short_folder, idle_seconds="3600") as stack:
        stack.environment["PYTHONPATH"] = os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")])
        for run, number in (("edited-1", "1.0"), ("edited-2", "22.0")):
            (own / "edited_rewards.py").write_text(f"def mine(episode): return {number}\n")
            stack.agentrl("submit", *flags, "--name", run)
            first = first or embedded.find_supervisor(stack.settings)
        assert embedded.find_supervisor(stack.settings) != first, "the stack that read the older file was started anew"
        given = "SELECT DISTINCT run, value FROM v_rewards WHERE part = 'edited_rewards:mine' ORDER BY run"
        assert [tuple(row.values()) for row in select(stack, given)] == [("edited-1", 1.0), ("edited-2", 22.0)]
        for run, remarks in (("edited-1", (OTHER_CODE,)), ("edited-2", ())):
            (row,) = select(stack, "SELECT min(id) AS id FROM v_episodes WHERE run = :run", run=run)
            prepared = prepare_fork(stack.database, ForkRequest(row["id"], 0, 1, with_parent=True))
            assert prepared.remarks == remarks
