"""Databases as they look after a long life, written by the database itself: one long run, or many short ones.

Every table and column that a run fills is filled (`tests/store/test_growth.py` compares with one that was played): most groups
of a long run have no variance, as users' have. Runs follow each other in time, so that a run's rows lie together; the last of a
shape is running, its last iteration half done. Each measures every tenth version. The first is forked, trained on once more
as a stored one, and rescored. Nothing is analysed: whoever measures says when (`databases.analyse`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    Connection,
    Float,
    Integer,
    Select,
    Text,
    and_,
    case,
    cast,
    column,
    func,
    insert,
    literal,
    null,
    select,
    update,
    values,
)

from agentrl.workflow.store.machine_loads import KEPT_SLOTS
from agentrl.workflow.store.reads.load_rows import SLOT_SECONDS
from agentrl.workflow.store.run_format import RUN_FORMAT
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.trajectory import OPEN, WHOLE

EVAL_EVERY = 10
GROUP_SIZE = 8
TASKS_PER_ITERATION = 16
PER_ITERATION = TASKS_PER_ITERATION * GROUP_SIZE
TASKS = 512
MINIBATCHES = 2
TURNS = 6
PROMPT_TOKENS, SAMPLED_TOKENS = 30, 100
FLAT = 60
"""Of a hundred groups so many whose episodes are all right, or all wrong."""

SHAPES: Mapping[str, Mapping[str, int]] = {
    "one run": {"long": 800},
    "100 runs": {**{f"run-{number}": 8 for number in range(1, 100)}, "live": 8},
}
"""Shape -> its runs, by name, with their iterations of 128 episodes."""

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
FINISHED = STARTED + timedelta(seconds=90)
PROMPT = [{"role": "user", "content": "How many apples are left when a third of them is eaten? " * 4}]
TEXT = "I should ask the calculator for the number of apples that are left over. " * 5
WEIGHTS = {"numeric_answer": 1.0, "format": 0.5}


@dataclass(frozen=True)
class Run:
    """One run of the synthetic database: its row's id, its name, its number of iterations, whether it still runs."""

    id: int
    name: str
    iterations: int
    running: bool

    @property
    def published(self) -> int:
        """How many policy versions it has: that which it started from, and one of each update."""
        return self.iterations + (not self.running)


def fill(tx: Connection, shape: Mapping[str, int]) -> list[Run]:
    """Writes the shape's runs into an empty, migrated database, six steps an episode. Returns them."""
    runs = [Run(id, name, iterations, id == len(shape)) for id, (name, iterations) in enumerate(shape.items(), 1)]
    _tasks(tx)
    for run in runs:
        assert _run(tx, run.name, "train", run.iterations, "running" if run.running else "done") == run.id
        _iterations(tx, run)
    for run in runs:
        _evals(tx, run)
    _fork(tx, runs[0])
    _groups(tx)
    _episodes(tx)
    _steps(tx)
    _calls(tx)
    _sessions(tx)
    _agents(tx)
    _annotations(tx)
    _resources(tx)
    _rewards(tx)
    _updates(tx)
    _again(tx, runs[0])
    _rescored(tx, runs[0])
    _events(tx)
    _loads(tx)
    return runs


def _tasks(tx: Connection) -> None:
    rows = [
        {"content_hash": f"{n:032x}", "key": f"train/{n}", "messages": PROMPT, "reference": str(n), "metadata": {"n": n}}
        for n in range(TASKS)
    ]
    tx.execute(schema.tasks.insert(), rows)


def _run(tx: Connection, name: str, kind: str, iterations: int, status: str, **more: Any) -> int:
    """The run's row, its tasks and its reward set; its id."""
    shown = {"name": name, "kind": kind, "status": status, "dataset": "synthetic", "base": "tiny", "base_hash": "b" * 64}
    moments = {"started_at": STARTED, "finished_at": None if status == "running" else FINISHED}
    asked = {"seed": 7, "format": RUN_FORMAT, "epochs": 1, "iterations": iterations, "output_dir": f"runs/{name}"}
    config = {"env": "math", "rollout": {"group_size": GROUP_SIZE}, "dataset": {"name": "synthetic", "split": "train"}}
    row = {**shown, **moments, **asked, "config": config, "manifest": {"id": f"{name:0>32}"}, **more}
    made: int = tx.execute(schema.runs.insert().values(row).returning(schema.runs.c.id)).scalar_one()
    _copy(tx, schema.run_tasks, {"run_id": literal(made), "task_id": schema.tasks.c.id}, select(), schema.tasks.c.id)
    tx.execute(schema.reward_sets.insert().values(run_id=made, name="default", code_hash="c" * 32, weights=WEIGHTS))
    return made


def _checkpoint(run: str, version: int) -> dict[str, Any]:
    if version == 0:
        return {"version": 0, "kind": "base"}
    return {"version": version, "kind": "trained", "path": f"runs/{run}/v{version}", "sha256": f"{run}{version:0>32}"}


def _iterations(tx: Connection, run: Run) -> None:
    versions = [{"path": "", "sha256": "", **_checkpoint(run.name, n), "run_id": run.id} for n in range(run.published)]
    tx.execute(schema.policies.insert(), versions)
    mine = select(schema.policies.c.id).where(schema.policies.c.run_id == run.id).order_by(schema.policies.c.version)
    policies = tx.execute(mine.limit(run.iterations)).scalars()
    open_one = run.iterations - 1 if run.running else None
    tx.execute(
        schema.iterations.insert(),
        [_iteration(run.id, number, policy, number != open_one) for number, policy in enumerate(policies)],
    )


def _iteration(run_id: int, number: int, policy_id: int, done: bool, episodes: int = PER_ITERATION) -> dict[str, Any]:
    sums = {"prompt_tokens": TURNS * PROMPT_TOKENS, "sampled_tokens": TURNS * SAMPLED_TOKENS, "tool_calls": TURNS // 2}
    row = {"run_id": run_id, "number": number, "epoch": number * TASKS_PER_ITERATION // TASKS, "policy_id": policy_id}
    return {
        **row,
        "status": "done" if done else "running",
        "episodes": episodes,
        "trainable": episodes if done else 0,
        "tool_errors": episodes // 23,
        **{name: per_episode * episodes if done else 0 for name, per_episode in sums.items()},
        "mean_reward": 0.5 if done else None,
        "update_seconds": 0.7 if done else None,
        "train_token": int(done),
        "train_sent_ms": 1_767_225_600_000,
        "train_sends": 1,
        "worker": "host:1:train" if done else "",
        "started_at": STARTED,
        "rolled_out_at": FINISHED if done else None,
        "finished_at": FINISHED if done else None,
    }


def _evals(tx: Connection, run: Run) -> None:
    for version in range(0, run.published, EVAL_EVERY):
        measured = {"measures_id": run.id, "measures_version": version}
        made = _run(tx, f"{run.name}-eval-{version}", "eval", 1, "done", **measured)
        _one_iteration(tx, made, PER_ITERATION, run.name, version)
        score = {"episodes": PER_ITERATION, "errors": 0, "tasks": PER_ITERATION, "mean_reward": 0.5, "low": 0.4, "high": 0.6}
        told = {"policy": f"tiny@{version}", "dataset": "synthetic", "split": "test", "accuracy": 0.5, "pass_at": {"1": 0.5}}
        tx.execute(schema.evals.insert().values(run_id=made, **score, **told))


def _fork(tx: Connection, run: Run) -> None:
    _one_iteration(tx, _run(tx, "forked", "fork", 1, "done"), GROUP_SIZE, run.name, 0)


def _one_iteration(tx: Connection, run_id: int, episodes: int, maker: str, version: int) -> None:
    policy = {**_checkpoint(maker, version), "run_id": run_id}
    policy_id = tx.execute(schema.policies.insert().values(policy).returning(schema.policies.c.id)).scalar_one()
    tx.execute(schema.iterations.insert().values(_iteration(run_id, 0, policy_id, True, episodes)))


def _groups(tx: Connection) -> None:
    """Half of those of an open iteration are not done; their episodes say later what they came to."""
    iterations, slot = schema.iterations.c, _numbers("slot", TASKS_PER_ITERATION)
    closed = (iterations.status == "done") | (slot.c.n < TASKS_PER_ITERATION // 2)
    rows = {
        "run_id": iterations.run_id,
        "iteration_id": iterations.id,
        "task_id": (iterations.number * TASKS_PER_ITERATION + slot.c.n) % TASKS + 1,
        "slot": slot.c.n,
        "kind": schema.runs.c.kind,
        "status": case((closed, "done"), else_="running"),
        "attempt": literal(1),
        "sent_ms": literal(1_767_225_600_000),
        "sends": literal(1),
        "worker": literal("host:1:rollout"),
        "lease_until": case((closed, null()), else_=literal(1_767_225_690_000)),
        "started_at": _at(STARTED),
        "finished_at": case((closed, _at(FINISHED))),
    }
    joined = select().join_from(schema.iterations, schema.runs, schema.runs.c.id == iterations.run_id).join(slot, literal(True))
    _copy(tx, schema.groups, rows, joined.where((schema.runs.c.kind != "fork") | (slot.c.n == 0)), iterations.id, slot.c.n)


def _episodes(tx: Connection) -> None:
    groups, sample = schema.groups.c, _numbers("sample", GROUP_SIZE)
    key = groups.id * 7919 + sample.c.n * 104729
    ended = groups.status == "done"
    failed = ended & (key % 97 == 0)
    done = ended & (key % 97 != 0)
    flat = (groups.id * 7919) % 100 < FLAT
    forked = groups.kind == "fork"
    rows = {
        "run_id": groups.run_id,
        "iteration_id": groups.iteration_id,
        "group_id": groups.id,
        "task_id": groups.task_id,
        "sample": sample.c.n,
        "status": case((failed, "failed"), (done, "done"), else_="running"),
        "stop_reason": case((done, case((key % 11 == 0, "max_tokens"), else_="answered"))),
        "error_class": case((failed, "RewardError"), else_=""),
        "error": case((failed, "the reward raised"), else_=""),
        "reward": case((done, case((flat, cast(groups.id % 8 != 0, Integer)), else_=cast(key % 5, Integer) / 4.0))),
        "final_answer": cast(key, Text),
        "steps": case((forked, TURNS - 1), else_=TURNS),
        "prompt_tokens": literal(TURNS * PROMPT_TOKENS),
        "sampled_tokens": literal(TURNS * SAMPLED_TOKENS),
        "tool_calls": literal(TURNS // 2),
        "tool_errors": case((key % 23 == 0, 1), else_=0),
        "generate_seconds": literal(0.17),
        "tool_seconds": literal(0.001),
        "tainted": key % 211 == 0,
        "parent_id": case((forked, 1)),
        "fork_step": case((forked, 1)),
        "inherited_steps": case((forked, 1), else_=0),
        "started_at": _at(STARTED),
        "finished_at": case((ended, _at(FINISHED))),
    }
    _copy(tx, schema.episodes, rows, select().select_from(schema.groups.join(sample, literal(True))), groups.id, sample.c.n)
    _score_groups(tx)


def _score_groups(tx: Connection) -> None:
    """The rewards of each group's done episodes; `std_reward` is right where it is 0, which is what is asked of it."""
    reward = schema.episodes.c.reward
    mine = (schema.episodes.c.group_id == schema.groups.c.id) & (schema.episodes.c.status == "done")
    best, worst, mean, spread, solved = (
        select(value).where(mine).scalar_subquery()
        for value in (
            *(func.max(reward), func.min(reward), func.avg(reward), (func.max(reward) - func.min(reward)) / 2),
            case((func.max(reward) >= 1, 1), (func.max(reward).is_not(None), 0)),
        )
    )
    done = update(schema.groups).where(schema.groups.c.status == "done")
    tx.execute(done.values(mean_reward=mean, std_reward=spread, best_reward=best, worst_reward=worst, solved=solved))


def _steps(tx: Connection) -> None:
    episodes, turn = schema.episodes.c, _numbers("turn", TURNS)
    rows = {
        "run": schema.runs.c.name,
        "episode_id": episodes.id,
        "attempt": episodes.attempt,
        "number": turn.c.n,
        "policy_id": schema.iterations.c.policy_id,
        "prompt": literal(PROMPT, schema.steps.c.prompt.type),
        "text": literal(TEXT),
        "content": literal(""),
        "content_start": literal(1),
        "content_length": literal(len(TEXT)),
        "finish_reason": literal("stop"),
        "prompt_tokens": literal(PROMPT_TOKENS),
        "sampled_tokens": literal(SAMPLED_TOKENS),
        "logprob_sum": cast(-((episodes.id * 31 + turn.c.n) % 1009), Float),
        "generate_seconds": literal(0.03),
        "sampled_at": _at(STARTED),
        "observed_at": _at(FINISHED),
    }
    joined = select().join_from(schema.episodes, schema.iterations, schema.iterations.c.id == episodes.iteration_id)
    joined = joined.join(schema.runs, schema.runs.c.id == episodes.run_id).join(turn, turn.c.n >= episodes.inherited_steps)
    _copy(tx, schema.steps, rows, joined, episodes.id, turn.c.n)
    blobs = {
        "step_id": schema.steps.c.id,
        "prompt_ids": literal(bytes(4 * PROMPT_TOKENS)),
        "sampled_ids": literal(bytes(4 * SAMPLED_TOKENS)),
        "behavior_logprobs": literal(bytes(4 * SAMPLED_TOKENS)),
    }
    _copy(tx, schema.step_tokens, blobs, select().select_from(schema.steps), schema.steps.c.id)
    _share_prompts(tx)


def _share_prompts(tx: Connection) -> None:
    """The first steps of a group have the prompt of its first episode's, which is stored once."""
    steps, tokens, episodes, groups = schema.steps.c, schema.step_tokens.c, schema.episodes.c, schema.groups.c
    first = select(episodes.group_id, func.min(steps.id).label("step")).where(steps.number == 0)
    owners = first.join(schema.episodes, episodes.id == steps.episode_id).group_by(episodes.group_id).subquery()
    owning = update(schema.groups).where(groups.id == owners.c.group_id)
    tx.execute(owning.values(prompt_step_id=owners.c.step, prompt_hash="d" * 32))
    sharing = update(schema.steps).where(steps.number == 0, episodes.id == steps.episode_id, groups.id == episodes.group_id)
    sharing = sharing.where(steps.id != groups.prompt_step_id)
    tx.execute(sharing.values(prompt_step_id=groups.prompt_step_id, prompt=[]))
    shared = select(steps.id).where(steps.prompt_step_id.is_not(None))
    tx.execute(update(schema.step_tokens).where(tokens.step_id.in_(shared)).values(prompt_ids=b""))


def _calls(tx: Connection) -> None:
    steps = schema.steps.c
    failed = steps.id % 29 == 0
    rows = {
        "run": steps.run,
        "episode_id": steps.episode_id,
        "step_id": steps.id,
        "attempt": steps.attempt,
        "step": steps.number,
        "call": literal(0),
        "tool": literal("calculator"),
        "arguments": literal({"expression": "6*7"}, schema.tool_calls.c.arguments.type),
        "status": literal("done"),
        "result": literal("42"),
        "error_class": case((failed, "division_by_zero"), else_=null()),
        "starts": literal(1),
        "sends": literal(1),
        "worker": literal("host:1:tools"),
        "seconds": literal(0.001),
        "created_at": _at(STARTED),
        "started_at": _at(STARTED),
        "finished_at": _at(FINISHED),
    }
    _copy(tx, schema.tool_calls, rows, select().where(steps.number < TURNS // 2), steps.id)


def _sessions(tx: Connection) -> None:
    episodes = schema.episodes.c
    rows = {"episode_id": episodes.id, "attempt": episodes.attempt, "tool": literal("python"), "owner": literal("")}
    _copy(tx, schema.tool_sessions, rows, select().select_from(schema.episodes), episodes.id)


def _agents(tx: Connection) -> None:
    """One for each episode, as if agents had made all of them."""
    episodes, runs = schema.episodes.c, schema.runs.c
    rows = {"run": runs.name, "episode_id": episodes.id, "attempt": episodes.attempt, "status": literal("ended")}
    of_runs = select().join_from(schema.episodes, schema.runs, runs.id == episodes.run_id)
    _copy(tx, schema.agent_attempts, rows, of_runs, episodes.id)


def _annotations(tx: Connection) -> None:
    """One for each episode."""
    episodes, runs = schema.episodes.c, schema.runs.c
    rows = {"run": runs.name, "episode_id": episodes.id, "attempt": episodes.attempt, "emission": literal("one")}
    rows |= {"step": literal(0), "source": literal("agent"), "kind": literal("reward"), "name": literal("own")}
    rows["data"] = literal({"value": 0.5}, JSON)
    of_runs = select().join_from(schema.episodes, schema.runs, runs.id == episodes.run_id)
    _copy(tx, schema.annotations, rows, of_runs, episodes.id)


def _resources(tx: Connection) -> None:
    """A prompt for each iteration, as if each run were a search: its groups work with it, and a critic had said it."""
    iterations, groups = schema.iterations.c, schema.groups.c
    ordered = select().select_from(schema.iterations)
    prompts = {
        "run_id": iterations.run_id,
        "name": literal("system"),
        "version": iterations.number,
        "content_hash": cast(iterations.number, Text),
        "text": literal(TEXT),
        "parent_version": case((iterations.number > 0, iterations.number - 1)),
        "note": literal("an edit"),
        "chosen": iterations.number == 0,
    }
    _copy(tx, schema.resources, prompts, ordered, iterations.id)
    resources = schema.resources.c
    used = select().join_from(schema.groups, schema.iterations, iterations.id == groups.iteration_id)
    used = used.join(schema.resources, (resources.run_id == iterations.run_id) & (resources.version == iterations.number))
    _copy(tx, schema.group_resources, {"group_id": groups.id, "resource_id": resources.id}, used, groups.id)
    said = {
        "run_id": iterations.run_id,
        "key": cast(iterations.id, Text),
        "model": literal("critic"),
        "messages": literal(PROMPT, JSON),
        "answer": literal(TEXT),
    }
    _copy(tx, schema.critic_calls, said, ordered, iterations.id)


def _rewards(tx: Connection) -> None:
    """Two parts; of every fourth run the second is given step by step."""
    by_step, turn = schema.episodes.c.run_id % 4 == 3, _numbers("turn", TURNS)
    _reward(tx, "default", "numeric_answer", literal(WHOLE), select())
    _reward(tx, "default", "format", literal(WHOLE), select().where(~by_step))
    _reward(tx, "default", "format", turn.c.n, select().join_from(turn, schema.episodes, by_step))


def _reward(tx: Connection, set_name: str, part: str, step: Any, among: Select[Any]) -> None:
    episodes, sets = schema.episodes.c, schema.reward_sets.c
    rows = {
        "run": schema.runs.c.name,
        "reward_set_id": sets.id,
        "episode_id": episodes.id,
        "part": literal(part),
        "step": step,
        "value": episodes.reward,
        "weight": literal(WEIGHTS.get(part, 1.0)),
    }
    scored = among.where(episodes.status == "done", sets.run_id == episodes.run_id, sets.name == set_name)
    _copy(tx, schema.rewards, rows, scored.where(schema.runs.c.id == episodes.run_id), episodes.id, step)


def _updates(tx: Connection) -> None:
    iterations, episodes, minibatch = schema.iterations.c, schema.episodes.c, _numbers("minibatch", MINIBATCHES)
    of_training = and_(schema.runs.c.id == iterations.run_id, schema.runs.c.kind == "train", iterations.status == "done")
    metrics = {name: literal(0.01) for name in schema.UPDATE_METRICS if name not in ("value_loss", "explained_variance")}
    updated = {
        "run_id": iterations.run_id,
        "iteration_id": iterations.id,
        "minibatch": minibatch.c.n,
        "rows": literal(PER_ITERATION * TURNS // MINIBATCHES),
        "tokens": literal(PER_ITERATION * TURNS * SAMPLED_TOKENS // MINIBATCHES),
        **metrics,
    }
    joined = select().join_from(schema.iterations, schema.runs, of_training)
    _copy(tx, schema.updates, updated, joined.join(minibatch, literal(True)), iterations.id, minibatch.c.n)
    own = joined.join(schema.episodes, episodes.iteration_id == iterations.id)
    _consume(tx, own.join(schema.groups, schema.groups.c.id == episodes.group_id), iterations)


def _consume(tx: Connection, members: Select[Any], iterations: Any) -> None:
    """What trained has its distance from the group's mean as advantage: 0 in a group without variance."""
    episodes, groups = schema.episodes.c, schema.groups.c
    consumed = {
        "run_id": iterations.run_id,
        "iteration_id": iterations.id,
        "episode_id": episodes.id,
        "advantage": case((groups.std_reward == 0, 0.0), else_=episodes.reward - groups.mean_reward),
    }
    _copy(tx, schema.consumptions, consumed, members.where(episodes.status == "done", ~episodes.tainted), episodes.id)


def _again(tx: Connection, run: Run) -> None:
    """A run that trains on the groups of the first two iterations of another."""
    made = _run(tx, "again", "train", 2, "done")
    tx.execute(schema.policies.insert().values({**_checkpoint(run.name, 0), "run_id": made}))
    policy_id = tx.execute(select(schema.policies.c.id).where(schema.policies.c.run_id == made)).scalar_one()
    tx.execute(schema.iterations.insert(), [_iteration(made, number, policy_id, True) for number in range(2)])
    groups, theirs, ours = schema.groups.c, schema.iterations.alias("theirs"), schema.iterations.c
    lent = select().join_from(schema.groups, theirs, theirs.c.id == groups.iteration_id)
    lent = lent.join(schema.iterations, (ours.number == theirs.c.number) & (ours.run_id == made))
    lent = lent.where(theirs.c.run_id == run.id, groups.status == "done")
    _copy(tx, schema.run_groups, {"run_id": ours.run_id, "group_id": groups.id}, lent, groups.id)
    slots = {"iteration_id": ours.id, "slot": groups.slot, "group_id": groups.id}
    _copy(tx, schema.iteration_groups, slots, lent, groups.id)
    stored = select().join_from(schema.iterations, schema.iteration_groups, schema.iteration_groups.c.iteration_id == ours.id)
    stored = stored.join(schema.groups, groups.id == schema.iteration_groups.c.group_id)
    _consume(tx, stored.join(schema.episodes, schema.episodes.c.group_id == groups.id).where(ours.run_id == made), ours)
    tx.execute(
        schema.updates.insert(), [_step_taken(made, row.id) for row in tx.execute(select(ours.id).where(ours.run_id == made))]
    )


def _step_taken(run_id: int, iteration_id: int) -> dict[str, Any]:
    return {"run_id": run_id, "iteration_id": iteration_id, "minibatch": 0, "rows": PER_ITERATION, "tokens": 1, "loss": 0.01}


def _rescored(tx: Connection, run: Run) -> None:
    """A second reward set of the run, beside the one that it trained with."""
    brevity = {"run_id": run.id, "name": "brevity", "code_hash": "d" * 32, "weights": {"brevity": 1.0}}
    tx.execute(schema.reward_sets.insert().values(brevity))
    _reward(tx, "brevity", "brevity", literal(WHOLE), select())


def _loads(tx: Connection) -> None:
    gpus = [{"name": "GPU", "share": 0.5, "memory_used": 2**30, "memory_total": 2**33}]
    waiting = {"waiting_rollout": 3, "waiting_train": 1, "waiting_tools": 2, "tokens_per_second": 150.0}
    load = {"host": "host", "cpu_share": 0.75, "memory_used": 2**32, "memory_total": 2**34, "gpus": gpus, **waiting}
    first = int(STARTED.timestamp()) // SLOT_SECONDS
    rows = [{**load, "slot": slot, "created_at": STARTED} for slot in range(first, first + KEPT_SLOTS)]
    tx.execute(schema.machine_loads.insert(), rows)


def _events(tx: Connection) -> None:
    groups, runs = schema.groups.c, schema.runs.c
    told = {"run_id": runs.id, "kind": literal("submitted"), "detail": literal("2 iterations")}
    _copy(tx, schema.events, told, select().select_from(schema.runs), runs.id)
    failed = {
        "run_id": groups.run_id,
        "kind": literal("group_failed"),
        "subject": literal("group 1"),
        "detail": literal("ServiceError: away"),
    }
    _copy(tx, schema.events, failed, select().where(groups.id % 50 == 0), groups.id)
    _copy(
        tx,
        schema.events,
        told | {"kind": literal("done"), "detail": literal("")},
        select().where(runs.status.not_in(OPEN)),
        runs.id,
    )


def _copy(tx: Connection, table: Any, rows: dict[str, Any], source: Any, *order: Any) -> None:
    """Fills the table's columns from the source's rows, in that order, so that ids grow with it."""
    tx.execute(insert(table).from_select(list(rows), source.add_columns(*rows.values()).order_by(*order)))


def _numbers(name: str, count: int) -> Any:
    """A table of one column `n` with 0 to count - 1."""
    return values(column("n", Integer), name=name).data([(n,) for n in range(count)]).cte(f"{name}s")


def _at(moment: datetime) -> Any:
    return literal(moment, Utc())
