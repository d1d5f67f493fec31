"""Claims of groups for rollouts: a group is claimed, handed back or failed, and its episodes are ended.

Every write of a rollout is accepted only if the group still has the rollout's attempt number. If a worker that was considered
lost returns, its attempt number is outdated, and its writes are rejected. Results of tool calls have no such condition: the
first result is stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Select,
    bindparam,
    case,
    exists,
    func,
    select,
    tuple_,
    update,
)

from agentrl.workflow.errors import Fenced
from agentrl.workflow.rewards import Part
from agentrl.workflow.stats.group_variance import mean_and_deviation
from agentrl.workflow.store.blocked_runs import awaits_maker
from agentrl.workflow.store.connect import Database, read_transaction, skip_flush, transaction
from agentrl.workflow.store.episode_loader import load_episodes, message_value, reward_rows, task_value
from agentrl.workflow.store.leases import memory_hint, note_takeover
from agentrl.workflow.store.planning import is_broken, log, select_unlocked
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.store.row_codecs import SORTED_CHARS
from agentrl.workflow.store.run_format import supports_format
from agentrl.workflow.store.run_resources import resources_of_group
from agentrl.workflow.store.solved_rule import judge_group
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import Utc, is_lease_free, is_one_of, now_ms
from agentrl.workflow.trajectory import OPEN, Episode, Message, PolicyRef, SamplingKey, Task, storable

MAX_LOSSES = 5
"""The number of lost workers at which a row fails. When this many workers were lost while holding a group, the group's open
episodes end as infra_error. When this many were lost while holding an iteration, the run fails.
"""


@dataclass(frozen=True, slots=True)
class Fence:
    """A claim on a group. A write that passes this claim is accepted only while the group has the same attempt number."""

    group: int
    attempt: int


@dataclass(frozen=True, slots=True)
class HeldEpisodes:
    """The episodes of a claimed group: the number of the current attempt and the number of steps of each, by episode id; the
    group's id, and the run's name.

    `prompt_steps` maps the hash of the shared prompt to the id of the step that stores it. It is empty before that.
    """

    group: int
    run: str
    attempts: Mapping[int, int]
    steps: Mapping[int, int]
    prompt_steps: dict[str, int]


@dataclass(frozen=True)
class GroupWork:
    """The data that a rollout job needs of one group. `episodes` are the unfinished episodes with their committed steps.

    `opening` has the messages that the first step after a fork reads instead of the env's messages; None for the env's
    messages. `resources` are the texts that the episodes use, by name. `clock` is the time that chat templates read whenever a
    prompt is rendered.
    """

    fence: Fence
    run_id: int
    run: str
    config: Mapping[str, Any]
    seed: int
    kind: str
    iteration: int
    policy: PolicyRef
    policy_id: int
    task: Task
    weights: Mapping[str, float]
    code_hash: str
    reward_set: int
    episodes: tuple[Episode, ...]
    clock: datetime
    opening: tuple[Message, ...] | None = None
    resources: Mapping[str, str] = field(default_factory=dict)

    def sampling_key(self, episode: Episode) -> SamplingKey:
        """Return the key of an episode's random draws."""
        return SamplingKey.of(episode, self.seed, self.kind, self.iteration)


@dataclass(frozen=True)
class Outcome:
    """The end of an episode: done with a stop_reason and reward parts, or failed or infra_error with an error.

    `answer_step` is the number of the episode's own step whose content is `final_answer`; None if there is no such step.
    `of_agent` is True if an external agent decided the turns and ran its own tool calls. `own_weights` has the weights of
    reward parts to which the run's weights do not refer.
    """

    episode: int
    status: str
    stop_reason: str | None = None
    reward: float | None = None
    parts: Mapping[str, Part] | None = None
    final_answer: str = ""
    error_class: str = ""
    error: str = ""
    of_agent: bool = False
    own_weights: Mapping[str, float] = field(default_factory=dict)
    answer_step: int | None = None


# claims

_GROUPS, _EPISODES = schema.groups.c, schema.episodes.c


def _is_open(status: Column[str]) -> ColumnElement[bool]:
    """Return the SQL condition that a status is not final."""
    return is_one_of(status, OPEN)


@cache
def _free_group(lease_seconds: float) -> PreparedStatement:
    """Select the group `:wanted` if it is open and no other worker than `:claimant` holds a live lease on it."""
    return PreparedStatement(
        select(_GROUPS.run_id, _GROUPS.worker, _GROUPS.losses, _GROUPS.lease_until)
        .add_columns(schema.runs.c.status, schema.runs.c.name, schema.runs.c.format)
        .join(schema.runs, schema.runs.c.id == _GROUPS.run_id)
        .where(_GROUPS.id == bindparam("wanted"), _is_open(_GROUPS.status), ~is_broken(_GROUPS.run_id), ~awaits_maker())
        .where(is_lease_free(_GROUPS.lease_until, lease_seconds) | (_GROUPS.worker == bindparam("claimant")))
        .with_for_update(of=schema.groups)
    )


_TAKE_GROUP = PreparedStatement(
    update(schema.groups)
    .where(_GROUPS.id == bindparam("wanted"))
    .values(
        attempt=_GROUPS.attempt + 1,
        status="running",
        lease_until=now_ms() + bindparam("lease", type_=BigInteger()),
        started_at=func.coalesce(_GROUPS.started_at, bindparam("now", type_=Utc())),
    )
    .returning(_GROUPS.attempt)
)


@transaction
def claim_group(tx: Connection, group: int, worker: str, lease_seconds: float) -> GroupWork | None:
    """Claim the group and load its work.

    Return None if the group has ended or another worker holds a live lease on it. Also return None if the run is not running,
    has a format that this agentrl does not support, or waits until a broken checkpoint is rebuilt. `worker` is a name that is
    unique to this claim. If the reply of the commit is lost and the caller repeats the claim, the name shows that both are the
    same claim. `lease_seconds` is the length of the lease, in seconds.
    """
    free = _free_group(lease_seconds).rows(tx, {"wanted": group, "claimant": worker})
    if not free:
        return None
    ((run_id, previous, losses, lease_until, status, run, run_format),) = free
    if status != "running" or not supports_format(run, run_format):
        return None
    lease_ms = int(lease_seconds * 1000)
    # A worker that hands its claim back clears its name; one that is still named there was lost.
    if previous not in ("", worker):
        note_takeover(tx, run_id, previous, f"group {group}", worker, (lease_until or 0) - lease_ms)
        losses += 1
    values = {"wanted": group, "worker": worker, "losses": losses, "now": datetime.now(UTC), "lease": lease_ms}
    ((attempt,),) = _TAKE_GROUP.rows(tx, values)
    fence = Fence(group, attempt)
    if losses >= MAX_LOSSES:
        hint = memory_hint(tx, run_id, previous)
        _fail_open_episodes(tx, fence, "oom" if hint else "lost", f"its worker was lost {losses} times{hint}")
        return None
    return _load_work(tx, fence)


_MEASURED = schema.runs.alias("measured")
_MEASURED_AT = select(_MEASURED.c.created_at).where(_MEASURED.c.id == schema.runs.c.measures_id).scalar_subquery()
CLOCK = case((_GROUPS.kind == "serve", _GROUPS.started_at), else_=func.coalesce(_MEASURED_AT, schema.runs.c.created_at)).label(
    "clock"
)
"""The time that chat templates read: the time of the run's submission. For an evaluation that a run planned itself, it is the
submission of that run. For a served episode, it is the time of the first request.

All turns of an episode read the same time, on each worker and in `replay --verify`. With the real clock, templates that print
the date (Llama 3.2, Granite, SmolLM3) would change earlier turns at midnight.
"""

_GROUP_WORK = PreparedStatement(
    select(
        CLOCK,
        schema.groups.c.run_id,
        schema.groups.c.kind,
        schema.groups.c.opening,
        schema.runs.c.name,
        schema.runs.c.config,
        schema.runs.c.seed,
        schema.runs.c.base,
        schema.runs.c.base_hash,
        schema.iterations.c.number,
        schema.iterations.c.policy_id,
        schema.policies.c.version,
        schema.policies.c.path,
        schema.policies.c.sha256,
        schema.tasks,
        schema.reward_sets.c.id.label("reward_set"),
        schema.reward_sets.c.weights,
        schema.reward_sets.c.code_hash,
    )
    .select_from(schema.groups)
    .join(schema.runs, schema.runs.c.id == schema.groups.c.run_id)
    .join(schema.iterations, schema.iterations.c.id == schema.groups.c.iteration_id)
    .join(schema.policies, schema.policies.c.id == schema.iterations.c.policy_id)
    .join(schema.tasks, schema.tasks.c.id == schema.groups.c.task_id)
    .join(schema.reward_sets, (schema.reward_sets.c.run_id == schema.runs.c.id) & (schema.reward_sets.c.name == "default"))
    .where(schema.groups.c.id == bindparam("wanted"))
)


def _load_work(tx: Connection, fence: Fence) -> GroupWork:
    (row,) = _GROUP_WORK.mappings(tx, {"wanted": fence.group})
    task = task_value(row)
    unfinished = _is_open(schema.episodes.c.status)
    return GroupWork(
        fence=fence,
        run_id=row["run_id"],
        run=row["name"],
        config=row["config"],
        seed=row["seed"],
        kind=row["kind"],
        iteration=row["number"],
        policy=PolicyRef(row["base"], row["base_hash"], row["path"], row["sha256"], row["version"]),
        policy_id=row["policy_id"],
        task=task,
        weights=row["weights"],
        code_hash=row["code_hash"],
        reward_set=row["reward_set"],
        episodes=load_episodes(tx, (schema.episodes.c.group_id == fence.group) & unfinished, {row["id"]: task}),
        clock=row["clock"],
        opening=tuple(message_value(message) for message in row["opening"]) if row["opening"] else None,
        resources=resources_of_group(tx, fence.group) if row["config"].get("resources") else {},
    )


@transaction
def note_code(tx: Connection, run_id: int, code_hash: str) -> None:
    """Write an event that the code of the run's rewards differs from the code at submission. Each hash is recorded once."""
    tx.execute(
        select(schema.runs.c.id).where(schema.runs.c.id == run_id).with_for_update()
    )  # so that of two at once one sees the other
    events = schema.events.c
    same_event = (events.run_id == run_id) & (events.kind == "code_changed") & (events.subject == code_hash)
    if tx.execute(select(events.id).where(same_event)).first() is None:
        log(tx, run_id, "code_changed", code_hash, "the code of the rewards differs from now on from the code at submission")


_OPEN_AMONG = select(_GROUPS.id).where(_GROUPS.id.in_(bindparam("groups", expanding=True)), _is_open(_GROUPS.status)).limit(1)


@read_transaction
def are_all_closed(tx: Connection, groups: Sequence[int]) -> bool:
    """Return whether all of these groups have ended."""
    return tx.execute(_OPEN_AMONG, {"groups": list(groups)}).first() is None


@read_transaction
def find_ready_iteration(tx: Connection, group: int) -> int | None:
    """Return the id of the group's iteration if all groups of the iteration have ended; else None."""
    others = schema.groups.alias()
    is_open = exists().where(others.c.iteration_id == _GROUPS.iteration_id, others.c.status.in_(OPEN))
    return tx.execute(select(_GROUPS.iteration_id).where(_GROUPS.id == group, ~is_open)).scalar_one_or_none()


def extend_leases(db: Database, fences: Sequence[Fence], lease_seconds: float) -> set[int]:
    """Renew the leases of these claims, and return the ids of the groups that the claims still hold.

    The groups that are not locked come first, and each other group has its own transaction. Otherwise, all renewed groups would
    stay locked while this function waits for the transaction that has locked one of them.
    """
    held = _extend_leases(db, fences, lease_seconds, select_unlocked(_GROUPS.id, [fence.group for fence in fences]))
    for fence in fences:
        if fence.group not in held:
            held |= _extend_leases(db, [fence], lease_seconds, [fence.group])
    return held


@transaction
def _extend_leases(
    tx: Connection, fences: Sequence[Fence], lease_seconds: float, groups: Select[tuple[int]] | list[int]
) -> set[int]:
    """Renew the leases of those claims whose groups are among `groups`; return the ids of these groups."""
    skip_flush(tx)
    extended = tx.execute(
        update(schema.groups)
        .where(tuple_(_GROUPS.id, _GROUPS.attempt).in_([(fence.group, fence.attempt) for fence in fences]))
        .where(_GROUPS.id.in_(groups), _GROUPS.status == "running", _GROUPS.worker != "")  # not handed back in between
        .values(lease_until=now_ms() + int(lease_seconds * 1000))
        .returning(_GROUPS.id)
    )
    return set(extended.scalars())


@transaction
def hand_back(tx: Connection, fence: Fence) -> None:
    """Release the claim early. The group is sent again at once, and no loss is counted."""
    tx.execute(
        update(schema.groups)
        .where(schema.groups.c.id == fence.group, schema.groups.c.attempt == fence.attempt, schema.groups.c.status == "running")
        .values(lease_until=now_ms() - 1, worker="")
    )


@transaction
def fail_attempt(tx: Connection, fence: Fence, error_class: str, error: str, max_attempts: int) -> bool:
    """Add one to the group's system failures, and release the claim. At `max_attempts` failures, the group's open episodes end
    as infra_error.

    Return True if this was the last attempt.
    """
    failures = tx.execute(
        update(schema.groups)
        .where(schema.groups.c.id == fence.group, schema.groups.c.attempt == fence.attempt, schema.groups.c.status == "running")
        .where(schema.groups.c.worker != "")  # one failure may be reported by the episode's loop and by the job's
        .values(failures=schema.groups.c.failures + 1, lease_until=now_ms() - 1, worker="")
        .returning(schema.groups.c.failures, schema.groups.c.run_id)
    ).one_or_none()
    if failures is None:
        return False
    log(tx, failures.run_id, "group_failed", f"group {fence.group}", f"{error_class}: {error}")
    if failures.failures >= max_attempts:
        _fail_open_episodes(tx, fence, error_class, error)
        return True
    return False


def _fail_open_episodes(tx: Connection, fence: Fence, error_class: str, error: str) -> None:
    _leave_unobserved(tx, _open_episodes(tx, fence))
    tx.execute(
        update(schema.episodes)
        .where(schema.episodes.c.group_id == fence.group, schema.episodes.c.status.in_(OPEN))
        .values(
            status="infra_error", error_class=error_class, error=storable(error) or error_class, finished_at=datetime.now(UTC)
        )
    )
    _close_group(tx, fence)


# ends

_END_EPISODE = PreparedStatement(
    update(schema.episodes)
    .where(_EPISODES.id == bindparam("of_episode"))
    .values(started_at=func.coalesce(_EPISODES.started_at, bindparam("began", type_=Utc())))
)
_LEAVE_CALLS = PreparedStatement(
    update(schema.tool_calls)
    .where(schema.tool_calls.c.episode_id == bindparam("of_episode"))
    .where(schema.tool_calls.c.kind == "agent", schema.tool_calls.c.status == "pending")
    .values(status="unobserved")
)
_NEW_REWARD = PreparedStatement(schema.rewards.insert().inline())
_OPEN_EPISODES = PreparedStatement(
    select(_EPISODES.id).where(_EPISODES.group_id == bindparam("group"), _is_open(_EPISODES.status))
)
_GROUP_MEMBERS = PreparedStatement(
    select(_EPISODES.run_id, _EPISODES.status, _EPISODES.reward).where(_EPISODES.group_id == bindparam("group"))
)
_CLOSE_GROUP = PreparedStatement(
    update(schema.groups).where(_GROUPS.id == bindparam("of_group"), _GROUPS.attempt == bindparam("of_attempt"))
)


@transaction
def finish_episodes(
    tx: Connection, fence: Fence, outcomes: Sequence[Outcome], reward_set: int, weights: Mapping[str, float]
) -> bool:
    """End episodes, and store their rewards. When the last open episode of the group ends, the group ends too. Return whether
    it did. Raise Fenced if another worker holds the group.

    The iteration is not locked, because the groups of an iteration often end together and would wait for each other. So ask
    `find_ready_iteration` after this commit whether all groups have ended. At least one of the groups that end together gets
    the answer yes; several may, and `mark_first_train_sent` chooses one of them.
    """
    return end_episodes(tx, fence, outcomes, reward_set, weights)


def end_episodes(
    tx: Connection, fence: Fence, outcomes: Sequence[Outcome], reward_set: int, weights: Mapping[str, float]
) -> bool:
    """End episodes in the transaction `tx`. See `finish_episodes`."""
    held = check_claim(tx, fence)
    open_ones = set(_open_episodes(tx, fence))
    ended = [outcome for outcome in outcomes if outcome.episode in open_ones]
    if ended:
        _END_EPISODE.run(tx, *(_episode_end_row(outcome) for outcome in ended))
    _leave_unobserved(tx, [outcome.episode for outcome in ended if outcome.of_agent])
    parts = [
        {
            "run": held.run,
            "reward_set_id": reward_set,
            "episode_id": outcome.episode,
            "weight": {**outcome.own_weights, **weights}.get(row["part"], 1.0),
            **row,
        }
        for outcome in ended
        for row in reward_rows(outcome.parts or {})
    ]
    if parts:
        _NEW_REWARD.run(tx, *parts)
    return _close_group(tx, fence)


def _leave_unobserved(tx: Connection, episodes: Sequence[int]) -> None:
    """Mark open calls of external agents as unobserved: no later request can show their results."""
    if episodes:
        _LEAVE_CALLS.run(tx, *({"of_episode": episode} for episode in episodes))


def _episode_end_row(outcome: Outcome) -> dict[str, Any]:
    now, answer = datetime.now(UTC), storable(outcome.final_answer)
    answer_step = outcome.answer_step if len(answer) > SORTED_CHARS else None
    return {
        "of_episode": outcome.episode,
        "status": outcome.status,
        "stop_reason": outcome.stop_reason,
        "reward": outcome.reward,
        "final_answer": answer if answer_step is None else answer[:SORTED_CHARS],
        "answer_step": answer_step,
        "error_class": outcome.error_class,
        "error": storable(outcome.error),
        "began": now,
        "finished_at": now,
    }


def _open_episodes(tx: Connection, fence: Fence) -> list[int]:
    return [episode for (episode,) in _OPEN_EPISODES.rows(tx, {"group": fence.group})]


def _close_group(tx: Connection, fence: Fence) -> bool:
    """End the group if all of its episodes have ended. Return whether it did."""
    if _open_episodes(tx, fence):
        return False
    members = _GROUP_MEMBERS.rows(tx, {"group": fence.group})
    rewards = [reward for _, status, reward in members if status == "done"]
    mean, std = mean_and_deviation(rewards)
    closed = {
        "status": "done",
        "mean_reward": mean,
        "std_reward": std,
        "best_reward": max(rewards, default=None),
        "worst_reward": min(rewards, default=None),
        "solved": judge_group(tx, members[0][0], fence.group) if rewards else None,
        "finished_at": datetime.now(UTC),
        "lease_until": None,
    }
    _CLOSE_GROUP.run(tx, {"of_group": fence.group, "of_attempt": fence.attempt, **closed})
    return True


_HELD_EPISODES = PreparedStatement(
    select(
        schema.runs.c.name,
        schema.episodes.c.id,
        schema.episodes.c.attempt,
        schema.episodes.c.inherited_steps + schema.episodes.c.steps,
        _GROUPS.prompt_hash,
        _GROUPS.prompt_step_id,
    )
    .select_from(schema.groups)
    .join(schema.runs, schema.runs.c.id == schema.groups.c.run_id)
    .join(schema.episodes, schema.episodes.c.group_id == schema.groups.c.id)
    .where(schema.groups.c.id == bindparam("group"), schema.groups.c.attempt == bindparam("attempt"))
    .where(schema.groups.c.status == "running")
    .with_for_update(of=schema.groups, key_share=True)  # on Postgres it locks the row against a claim that would overtake us
)


def check_claim(tx: Connection, fence: Fence) -> HeldEpisodes:
    """Return the episodes of the claimed group. Raise Fenced if another worker holds the group."""
    rows = _HELD_EPISODES.rows(tx, {"group": fence.group, "attempt": fence.attempt})
    if not rows:
        raise Fenced(f"Group {fence.group} is no longer held by attempt {fence.attempt}.")
    run, *_, prompt_hash, prompt_step = rows[0]
    attempts, steps = ({row[1]: row[place] for row in rows} for place in (2, 3))
    return HeldEpisodes(fence.group, run, attempts, steps, {} if prompt_step is None else {prompt_hash: prompt_step})
