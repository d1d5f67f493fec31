"""A database as it looks after a long life: five runs, 100,000 episodes, 600,000 steps, written by the database itself.

All rows keep the constraints of real ones. Runs follow each other in time, so that a run's rows lie together: a small old one,
a large one of 60%, two more, and one that is running, its last iteration half done. Each measures every tenth version; of these
evaluations there is what they came to, and none of the episodes that they sampled.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Float, Integer, Text, case, cast, column, insert, literal, null, select, text, values

from workflow import db
from workflow.columns import Utc

EVAL_EVERY = 10
HELD_OUT = 128
GROUP_SIZE = 8
TASKS_PER_ITERATION = 16
TURNS = 6
PROMPT_TOKENS, SAMPLED_TOKENS = 30, 100
RUNS = {"old": 0.05, "large": 0.6, "middle": 0.1, "late": 0.15, "live": 0.1}
"""Name -> share of the episodes; the last one is running."""

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
FINISHED = STARTED + timedelta(seconds=90)
PROMPT = [{"role": "user", "content": "How many apples are left when a third of them is eaten? " * 4}]
TEXT = "I should ask the calculator for the number of apples that are left over. " * 5


@dataclass(frozen=True)
class Run:
    """One run of the synthetic database: its row's id, its name, its number of iterations, whether it still runs."""

    id: int
    name: str
    iterations: int
    running: bool


def fill(tx: Connection, episodes: int) -> list[Run]:
    """Writes the runs into an empty, migrated database: about so many episodes, six steps each. Returns the runs."""
    per_iteration = TASKS_PER_ITERATION * GROUP_SIZE
    tasks = max(TASKS_PER_ITERATION, episodes // 50)
    shares = enumerate(RUNS.items(), 1)
    runs = [Run(id, name, max(2, round(share * episodes / per_iteration)), name == "live") for id, (name, share) in shares]
    _tasks(tx, tasks)
    for run in runs:
        _run(tx, run)
    _iterations(tx, runs)
    _groups(tx, tasks)
    _episodes(tx)
    _steps(tx)
    _calls(tx)
    _sessions(tx)
    _rewards(tx)
    _updates(tx)
    for run in runs:
        _evals(tx, run)
    return runs


def _tasks(tx: Connection, count: int) -> None:
    rows = [
        {"content_hash": f"{n:032x}", "key": f"train/{n}", "messages": PROMPT, "reference": str(n), "metadata": {}}
        for n in range(count)
    ]
    tx.execute(db.tasks.insert(), rows)


def _run(tx: Connection, run: Run) -> None:
    shown = {"name": run.name, "status": "running" if run.running else "done", "dataset": "synthetic", "base": "tiny"}
    counts = {"seed": run.id, "epochs": 1, "iterations": run.iterations, "started_at": STARTED}
    tx.execute(db.runs.insert().values(**shown, **counts, config={"env": "math"}, manifest={}))
    tx.execute(db.reward_sets.insert().values(run_id=run.id, name="default", code_hash="0", weights={"numeric_answer": 1.0}))


def _iterations(tx: Connection, runs: list[Run]) -> None:
    numbered = [(run, number) for run in runs for number in range(run.iterations)]
    tx.execute(db.policies.insert(), [{"run_id": run.id, "version": n, "kind": "trained"} for run, n in numbered])
    policies = tx.execute(select(db.policies.c.id).order_by(db.policies.c.id)).scalars()
    open_ones = {(run.id, run.iterations - 1) for run in runs if run.running}
    rows = [
        {
            "run_id": run.id,
            "number": number,
            "epoch": 0,
            "policy_id": policy_id,
            "status": "running" if (run.id, number) in open_ones else "done",
            "episodes": TASKS_PER_ITERATION * GROUP_SIZE,
            "mean_reward": 0.5,
            "train_sends": 1,
            "started_at": STARTED,
        }
        for (run, number), policy_id in zip(numbered, policies, strict=True)
    ]
    tx.execute(db.iterations.insert(), rows)


def _groups(tx: Connection, tasks: int) -> None:
    iterations, slot = db.iterations.c, _numbers("slot", TASKS_PER_ITERATION)
    closed = (iterations.status == "done") | (slot.c.n < TASKS_PER_ITERATION // 2)
    rows = {
        "run_id": iterations.run_id,
        "iteration_id": iterations.id,
        "task_id": (iterations.number * TASKS_PER_ITERATION + slot.c.n) % tasks + 1,
        "slot": slot.c.n,
        "status": case((closed, "done"), else_="running"),
        "mean_reward": case((closed, 0.5)),
        "std_reward": case((closed, cast((iterations.id + slot.c.n) % 3, Float))),
        "started_at": _at(STARTED),
        "finished_at": case((closed, _at(FINISHED))),
        "attempt": literal(1),
        "sends": literal(1),
    }
    _copy(tx, db.groups, rows, select().select_from(db.iterations.join(slot, literal(True))), iterations.id, slot.c.n)


def _episodes(tx: Connection) -> None:
    groups, sample = db.groups.c, _numbers("sample", GROUP_SIZE)
    key = groups.id * 7919 + sample.c.n * 104729
    ended = groups.status == "done"
    failed = ended & (key % 97 == 0)
    done = ended & (key % 97 != 0)
    rows = {
        "run_id": groups.run_id,
        "iteration_id": groups.iteration_id,
        "group_id": groups.id,
        "task_id": groups.task_id,
        "sample": sample.c.n,
        "status": case((failed, "failed"), (done, "done"), else_="running"),
        "stop_reason": case((done, case((key % 11 == 0, "max_tokens"), else_="answered"))),
        "error": case((failed, "the reward raised"), else_=""),
        "reward": case((done, cast(key % 5, Float) / 4)),
        "final_answer": cast(key, Text),
        "steps": literal(TURNS),
        "prompt_tokens": literal(TURNS * PROMPT_TOKENS),
        "sampled_tokens": literal(TURNS * SAMPLED_TOKENS),
        "tool_calls": literal(TURNS // 2),
        "tool_errors": case((key % 23 == 0, 1), else_=0),
        "started_at": _at(STARTED),
        "finished_at": case((ended, _at(FINISHED))),
    }
    _copy(tx, db.episodes, rows, select().select_from(db.groups.join(sample, literal(True))), groups.id, sample.c.n)


def _steps(tx: Connection) -> None:
    episodes, turn = db.episodes.c, _numbers("turn", TURNS)
    rows = {
        "run": db.runs.c.name,
        "episode_id": episodes.id,
        "attempt": episodes.attempt,
        "number": turn.c.n,
        "policy_id": db.iterations.c.policy_id,
        "prompt": literal(PROMPT, db.steps.c.prompt.type),
        "text": literal(TEXT),
        "content": literal(TEXT),
        "finish_reason": literal("stop"),
        "prompt_tokens": literal(PROMPT_TOKENS),
        "sampled_tokens": literal(SAMPLED_TOKENS),
        "logprob_sum": cast(-((episodes.id * 31 + turn.c.n) % 1009), Float),
        "sampled_at": _at(STARTED),
        "observed_at": _at(FINISHED),
    }
    joined = select().join_from(db.episodes, db.iterations, db.iterations.c.id == episodes.iteration_id)
    joined = joined.join(db.runs, db.runs.c.id == episodes.run_id).join(turn, literal(True))
    _copy(tx, db.steps, rows, joined, episodes.id, turn.c.n)
    blobs = {
        "step_id": db.steps.c.id,
        "prompt_ids": literal(bytes(4 * PROMPT_TOKENS)),
        "sampled_ids": literal(bytes(4 * SAMPLED_TOKENS)),
        "behavior_logprobs": literal(bytes(4 * SAMPLED_TOKENS)),
    }
    _copy(tx, db.step_tokens, blobs, select().select_from(db.steps), db.steps.c.id)


def _calls(tx: Connection) -> None:
    steps = db.steps.c
    failed = steps.id % 29 == 0
    rows = {
        "run": steps.run,
        "episode_id": steps.episode_id,
        "step_id": steps.id,
        "attempt": steps.attempt,
        "step": steps.number,
        "call": literal(0),
        "tool": literal("calculator"),
        "arguments": literal({"expression": "6*7"}, db.tool_calls.c.arguments.type),
        "status": literal("done"),
        "result": literal("42"),
        "error_class": case((failed, "division_by_zero"), else_=null()),
        "created_at": _at(STARTED),
        "started_at": _at(STARTED),
        "finished_at": _at(FINISHED),
    }
    _copy(tx, db.tool_calls, rows, select().where(steps.number < TURNS // 2), steps.id)


def _sessions(tx: Connection) -> None:
    episodes = db.episodes.c
    rows = {"episode_id": episodes.id, "attempt": episodes.attempt, "tool": literal("python"), "owner": literal("")}
    _copy(tx, db.tool_sessions, rows, select().select_from(db.episodes), episodes.id)


def _rewards(tx: Connection) -> None:
    episodes, sets = db.episodes.c, db.reward_sets.c
    for part in ("numeric_answer", "format"):
        rows = {
            "run": db.runs.c.name,
            "reward_set_id": sets.id,
            "episode_id": episodes.id,
            "part": literal(part),
            "value": episodes.reward,
            "weight": literal(1.0),
        }
        scored = select().join_from(db.episodes, db.reward_sets, sets.run_id == episodes.run_id)
        scored = scored.join(db.runs, db.runs.c.id == episodes.run_id)
        _copy(tx, db.rewards, rows, scored.where(episodes.status == "done"), episodes.id)


def _updates(tx: Connection) -> None:
    iterations, episodes = db.iterations.c, db.episodes.c
    updated = {
        "run_id": iterations.run_id,
        "iteration_id": iterations.id,
        "minibatch": literal(0),
        "loss": literal(0.5),
        "kl": literal(0.01),
    }
    _copy(tx, db.updates, updated, select().where(iterations.status == "done"), iterations.id)
    consumed = {
        "run_id": episodes.run_id,
        "iteration_id": episodes.iteration_id,
        "episode_id": episodes.id,
        "advantage": literal(0.25),
    }
    joined = select().join_from(db.episodes, db.iterations, iterations.id == episodes.iteration_id)
    _copy(tx, db.consumptions, consumed, joined.where(iterations.status == "done", episodes.status == "done"), episodes.id)


def _evals(tx: Connection, run: Run) -> None:
    policies = select(db.policies.c.version).where(db.policies.c.run_id == run.id)
    for version in tx.execute(policies.where(db.policies.c.version % EVAL_EVERY == 0)).scalars().all():
        shown = {"name": f"{run.name}-eval-{version}", "kind": "eval", "status": "done", "dataset": "synthetic", "base": "tiny"}
        counts = {"seed": run.id, "epochs": 1, "iterations": 1, "started_at": STARTED, "finished_at": FINISHED}
        row = {**shown, **counts, "config": {"env": "math"}, "manifest": {}, "measures_id": run.id, "measures_version": version}
        made = tx.execute(db.runs.insert().values(row).returning(db.runs.c.id)).scalar_one()
        policy = tx.execute(
            db.policies.insert().values(run_id=made, version=version, kind="trained").returning(db.policies.c.id)
        ).scalar_one()
        done = {"number": 0, "epoch": 0, "status": "done", "started_at": STARTED, "finished_at": FINISHED}
        tx.execute(db.iterations.insert().values(run_id=made, policy_id=policy, **done))
        score = {"episodes": HELD_OUT, "errors": 0, "tasks": HELD_OUT, "mean_reward": 0.5, "low": 0.4, "high": 0.6}
        told = {"policy": f"tiny@{version}", "dataset": "synthetic", "split": "test", "accuracy": 0.5, "pass_at": {"1": 0.5}}
        tx.execute(db.evals.insert().values(run_id=made, **score, **told))


def _copy(tx: Connection, table: Any, rows: dict[str, Any], source: Any, *order: Any) -> None:
    """Fills the table's columns from the source's rows, in that order, so that ids grow with it."""
    tx.execute(insert(table).from_select(list(rows), source.add_columns(*rows.values()).order_by(*order)))


def _numbers(name: str, count: int) -> Any:
    """A table of one column `n` with 0 to count - 1."""
    return values(column("n", Integer), name=name).data([(n,) for n in range(count)]).cte(f"{name}s")


def _at(moment: datetime) -> Any:
    return literal(moment, Utc())


def settle(tx: Connection) -> None:
    """What Postgres does by itself soon after: counts its rows, so that it plans with them. SQLite does nothing like it."""
    if tx.dialect.name == "postgresql":
        tx.execute(text("VACUUM ANALYZE"))
