"""Runs about which a reader has questions: a code run with errors whose reward drops, a run of agents with several chains,
and a run that broke and was resumed. The demo's store has evaluations besides.
"""

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from agentrl.workers.page import demo
from agentrl.workflow.store import planning, rollout_claims, steps, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.tool_calls import record_result
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.training.advantages import group_relative
from agentrl.workflow.trajectory import CallRecord, Message, Step, StepRecord, ToolCall, ToolResult
from tests.support.played_runs import claim, claim_training, submission, update_of, values

PROGRAM = "def area(r): return 3.14 * r ** 2"
WRONG = "def area(r) return 3.14 * r"
ERROR = "SyntaxError: expected ':'"
REASON = "none of the 4 episodes can train: 4 failed"
WHY_FAILED = "reward 'my_rewards:broken' raised ValueError: no such key"


def open_store() -> Path:
    """Return the home of the demo's store with the runs added."""
    where = demo.open_demo()
    with closing(open_database(where.database)) as database:
        add_runs(database)
    return where.root


def add_runs(database: Database) -> None:
    """Add the runs to a migrated store."""
    _add_code_run(database)
    _add_agent_run(database)
    _add_broken_run(database)


def _add_code_run(database: Database) -> None:
    """Four iterations of two tasks: the third, with errors, no longer solves the first task. The second is never solved."""
    run = planning.submit(database, submission("code", epochs=4)).id
    for rewards, program in (((0.5, 0.0), PROGRAM), ((1.0, 0.25), PROGRAM), ((0.0, 0.0), WRONG), ((0.5, 0.5), PROGRAM)):
        for group, reward in _start(database, run, rewards):
            work = claim(database, group)
            for place in range(len(work.episodes)):
                _call(database, work, place, program, error=program == WRONG)
                _end(database, work, place, reward * place, program)
        _train(database, run)


def _start(database: Database, run: int, rewards: tuple[float, ...]) -> list[tuple[int, float]]:
    """The groups of the run's next iteration, in the order of their tasks, with those rewards."""
    (iteration,) = planning.open_iterations(database, run)
    groups = planning.start_iteration(database, iteration)
    planning.mark_groups_sent(database, groups)
    query = "SELECT task_id FROM groups WHERE id = :id"
    return list(zip(sorted(groups, key=lambda group: values(database, query, id=group)), rewards, strict=True))


def _train(database: Database, run: int) -> None:
    query = "SELECT id FROM iterations WHERE run_id = :run AND status = 'running' ORDER BY id"
    (iteration,) = values(database, query, run=run)
    work = claim_training(database, iteration)
    train_commits.commit_update(database, work, update_of(work, advantages=_advantages(work)), 3)


def _advantages(work: IterationWork) -> dict[int, float]:
    """The advantages of GRPO by episode: 0 where all rewards of a group are equal."""
    advantages = {}
    for group in work.groups:
        credited = group_relative(torch.tensor([episode.reward for episode in group.episodes])).tolist()
        advantages |= {episode.id or 0: value for episode, value in zip(group.episodes, credited, strict=True)}
    return advantages


def _call(database: Database, work: GroupWork, place: int, program: str, error: bool) -> None:
    """A turn that runs a program, and its result."""
    call = CallRecord(ToolCall("run_code", {"code": program}), "none", None)
    said = Message("assistant", "I run it.", "Is it right?", (call.call,))
    turn = Step(0, (Message("user", "Write area(r)."),), (1, 2), (3, 4), (-0.5, -0.25), "stop", said, policy_version=0)
    episode = work.episodes[place].id or 0
    ((number,),) = steps.commit_sampled(database, work.fence, [StepRecord(episode, turn, work.policy_id, program, (call,))])
    result = ToolResult(ERROR, "code_error", 0.5) if error else ToolResult("3.14", None, 0.5)
    assert record_result(database, number, result, datetime.now(UTC), "tools:1")
    steps.commit_observed(database, work.fence, [(episode, replace(turn, results=(result,)))])


def _end(database: Database, work: GroupWork, place: int, reward: float, answer: str) -> None:
    outcome = Outcome(work.episodes[place].id or 0, "done", "answered", reward, {"numeric_answer": reward}, answer)
    rollout_claims.finish_episodes(database, work.fence, [outcome], work.reward_set, work.weights)


def _add_agent_run(database: Database) -> None:
    """One iteration whose episodes have a main chain and a second one, which an outside agent opened."""
    run = planning.submit(database, submission("agents", epochs=1, seed=7)).id
    for group, reward in _start(database, run, (1.0, 0.5)):
        work = claim(database, group)
        for place in range(len(work.episodes)):
            _call(database, work, place, PROGRAM, error=False)
            said = Message("assistant", "I ask a second model.", "")
            prompt = (Message("system", "You summarise."), Message("user", "Summarise."))
            turn = Step(1, prompt, (7, 8), (9,), (-0.75,), "stop", said, policy_version=0, new_row="another prompt", chain=1)
            record = StepRecord(work.episodes[place].id or 0, turn, work.policy_id, said.content, ())
            steps.commit_sampled(database, work.fence, [record])
            _end(database, work, place, reward * place, "a summary")
    _train(database, run)


def _add_broken_run(database: Database) -> None:
    """A run whose reward raised: it stopped, was resumed, and stopped again."""
    run = planning.submit(database, submission("broken", epochs=1, seed=8)).id
    for group, _ in _start(database, run, (0.0, 0.0)):
        work = claim(database, group)
        failures = [Outcome(one.id or 0, "failed", error_class="RewardError", error=WHY_FAILED) for one in work.episodes]
        rollout_claims.finish_episodes(database, work.fence, failures, work.reward_set, work.weights)
    planning.stop(database, "broken", "paused", REASON)
    planning.resume(database, "broken")
    planning.stop(database, "broken", "paused", REASON)
