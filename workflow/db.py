"""The rows: every table, constraint, index and view of agentrl, for SQLite and Postgres alike.

Typed columns for whatever one filters or groups by; packed little-endian int32 and float32 blobs only in `step_tokens`, so that
no list or view reads a blob. There the column is the action mask: `prompt_ids` were given to the policy, `sampled_ids` are its
own. Constraints, not code, keep the invariants: unique keys make every job idempotent, checks bind a status to what must be
known in it, triggers keep terminal states terminal.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    func,
    literal,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from workflow.trajectory import TRANSITIONS

Id = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Utc(TypeDecorator[datetime]):
    """A moment in UTC: `timestamptz` on Postgres, ISO text on SQLite; always aware in Python."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Stored as UTC."""
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """SQLite forgets the zone; it was UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class now_ms(FunctionElement[int]):  # noqa: N801 - reads as a SQL function
    """The database's own clock, in ms since 1970: leases compare it, never a worker's clock."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_sqlite(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_postgres(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"


def _id() -> Column[int]:
    return Column("id", Id, primary_key=True, autoincrement=True)


def _key(name: str, target: str, nullable: bool = False, index: bool = False) -> Column[int]:
    return Column(name, Id, ForeignKey(f"{target}.id"), nullable=nullable, index=index)


def _text(name: str, default: str | None = "") -> Column[str]:
    return Column(name, Text, nullable=default is None, server_default=default)


def _count(name: str) -> Column[int]:
    return Column(name, Id, nullable=False, server_default="0")


def _number(name: str) -> Column[float]:
    return Column(name, Float(53), nullable=True)


def _seconds(name: str) -> Column[float]:
    return Column(name, Float(53), nullable=False, server_default="0")


def _at(name: str) -> Column[datetime]:
    return Column(name, Utc, nullable=True)


def _created() -> Column[datetime]:
    return Column("created_at", Utc, nullable=False, server_default=func.now())


def _run_name() -> Column[str]:
    # In the row itself, so that a run's newest rows are one range of an index: Postgres finds no such range through a join.
    return Column("run", String(64), nullable=False)


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


RUN_STATUS = ("planned", "running", "paused", "done", "failed", "cancelled")
WORK_STATUS = ("planned", "running", "done", "cancelled")
EPISODE_STATUS = tuple(TRANSITIONS)
STOP_REASONS = ("answered", "max_steps", "max_tokens", "parse_error", "tool_error", "timeout")
CALL_STATUS = ("pending", "started", "done", "unknown_outcome")
EFFECTS = ("none", "repeatable", "once")
CALL_KINDS = ("call", "grade")

runs = Table(
    "runs",
    metadata,
    _id(),
    Column("name", String(64), nullable=False, unique=True),
    Column("kind", String(8), nullable=False, server_default="train"),
    Column("status", String(16), nullable=False, server_default="planned", index=True),
    _text("reason"),
    Column("config", JSON, nullable=False),
    Column("manifest", JSON, nullable=False),
    Column("seed", Id, nullable=False),
    _text("dataset"),
    _text("base"),
    _text("base_hash"),
    Column("epochs", Integer, nullable=False),
    Column("iterations", Integer, nullable=False),
    _text("output_dir"),
    Column("bad_updates", Integer, nullable=False, server_default="0"),
    Column("reward_set", String(64), nullable=False, server_default="default"),
    _created(),
    _at("started_at"),
    _at("finished_at"),
    _one_of("status", RUN_STATUS),
    _one_of("kind", ("train", "eval", "fork")),
)

tasks = Table(
    "tasks",
    metadata,
    _id(),
    Column("content_hash", String(32), nullable=False, unique=True),
    _text("key"),
    Column("messages", JSON, nullable=False),
    _text("reference"),
    Column("metadata", JSON, nullable=False),
)

run_tasks = Table(
    "run_tasks",
    metadata,
    Column("run_id", Id, ForeignKey("runs.id"), primary_key=True),
    Column("task_id", Id, ForeignKey("tasks.id"), primary_key=True),
)

run_groups = Table(
    "run_groups",
    metadata,
    Column("run_id", Id, ForeignKey("runs.id"), primary_key=True),
    Column("group_id", Id, ForeignKey("groups.id"), primary_key=True),
)
"""The stored groups that a run trains on, where it makes none of its own."""

policies = Table(
    "policies",
    metadata,
    _id(),
    _key("run_id", "runs"),
    Column("version", Integer, nullable=False),
    Column("kind", String(8), nullable=False),
    _text("path"),
    _text("sha256"),
    _at("collected_at"),
    _text("broken"),
    _created(),
    UniqueConstraint("run_id", "version"),
    _one_of("kind", ("base", "trained", "alias")),
)

iterations = Table(
    "iterations",
    metadata,
    _id(),
    _key("run_id", "runs"),
    Column("number", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("status", String(16), nullable=False, server_default="planned"),
    _key("policy_id", "policies"),
    Column("train_token", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    _text("worker"),
    Column("train_sent_ms", BigInteger, nullable=True),
    Column("train_sends", Integer, nullable=False, server_default="0"),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("too_few", String(8), nullable=False, server_default=""),
    _count("episodes"),
    _count("trainable"),
    _count("dropped_groups"),
    _number("mean_reward"),
    _count("prompt_tokens"),
    _count("sampled_tokens"),
    _count("tool_calls"),
    _count("tool_errors"),
    _number("update_seconds"),
    _text("skipped"),
    _created(),
    _at("started_at"),
    _at("rolled_out_at"),
    _at("finished_at"),
    UniqueConstraint("run_id", "number"),
    _one_of("status", WORK_STATUS),
    _one_of("too_few", ("", "paused", "accepted")),
)

groups = Table(
    "groups",
    metadata,
    _id(),
    _key("run_id", "runs", index=True),
    _key("iteration_id", "iterations"),
    _key("task_id", "tasks"),
    Column("slot", Integer, nullable=False),
    Column("kind", String(8), nullable=False, server_default="train"),
    Column("status", String(16), nullable=False, server_default="planned"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    _text("worker"),
    Column("sent_ms", BigInteger, nullable=True),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("failures", Integer, nullable=False, server_default="0"),
    _text("dropped"),
    Column("opening", JSON(none_as_null=True), nullable=True),
    _number("mean_reward"),
    _number("std_reward"),
    _at("started_at"),
    _at("finished_at"),
    UniqueConstraint("iteration_id", "slot"),
    _one_of("status", WORK_STATUS),
    _one_of("kind", ("train", "eval", "fork")),
)

iteration_groups = Table(
    "iteration_groups",
    metadata,
    Column("iteration_id", Id, ForeignKey("iterations.id"), primary_key=True),
    Column("slot", Integer, primary_key=True, autoincrement=False),
    _key("group_id", "groups", index=True),
    _text("dropped"),
)
"""The stored groups of one iteration of such a run."""

episodes = Table(
    "episodes",
    metadata,
    _id(),
    _key("run_id", "runs"),
    _key("iteration_id", "iterations", index=True),
    _key("group_id", "groups"),
    _key("task_id", "tasks"),
    Column("sample", Integer, nullable=False),
    Column("status", String(16), nullable=False, server_default="planned"),
    Column("stop_reason", String(16), nullable=True),
    Column("attempt", Integer, nullable=False, server_default="0"),
    _text("error_class"),
    _text("error"),
    _number("reward"),
    _text("final_answer"),
    _count("steps"),
    _count("prompt_tokens"),
    _count("sampled_tokens"),
    _count("tool_calls"),
    _count("tool_errors"),
    _seconds("generate_seconds"),
    _seconds("tool_seconds"),
    Column("tainted", Boolean, nullable=False, server_default="0"),
    _key("parent_id", "episodes", nullable=True, index=True),
    Column("fork_step", Integer, nullable=True),
    Column("inherited_steps", Integer, nullable=False, server_default="0"),
    _created(),
    _at("started_at"),
    _at("finished_at"),
    UniqueConstraint("group_id", "sample"),
    _one_of("status", EPISODE_STATUS),
    CheckConstraint("(status = 'done') = (stop_reason IS NOT NULL)", name="done_has_stop_reason"),
    CheckConstraint("status <> 'done' OR reward IS NOT NULL", name="done_has_reward"),
    CheckConstraint("status NOT IN ('failed', 'infra_error') OR error <> ''", name="failed_has_error"),
    Index("ix_episodes_run_status", "run_id", "status"),
    Index("ix_episodes_run", "run_id", "id"),
)

steps = Table(
    "steps",
    metadata,
    _id(),
    _key("episode_id", "episodes"),
    Column("attempt", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    _key("policy_id", "policies"),
    Column("prompt", JSON, nullable=False),
    _text("text"),
    _text("content"),
    _text("thought"),
    _text("new_row", default=None),
    Column("finish_reason", String(8), nullable=False),
    _count("prompt_tokens"),
    _count("sampled_tokens"),
    _seconds("logprob_sum"),
    _seconds("generate_seconds"),
    Column("sampled_at", Utc, nullable=False),
    _at("observed_at"),
    _run_name(),
    UniqueConstraint("episode_id", "attempt", "number"),
    Index("ix_steps_run", "run", "id"),
    _one_of("finish_reason", ("stop", "length")),
)

step_tokens = Table(
    "step_tokens",
    metadata,
    Column("step_id", Id, ForeignKey("steps.id"), primary_key=True, autoincrement=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("behavior_logprobs", LargeBinary, nullable=False),
)

tool_calls = Table(
    "tool_calls",
    metadata,
    _id(),
    _key("episode_id", "episodes"),
    _key("step_id", "steps", index=True),
    Column("attempt", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("call", Integer, nullable=False),
    Column("tool", String(128), nullable=False, index=True),
    Column("arguments", JSON, nullable=False),
    Column("kind", String(8), nullable=False, server_default="call"),
    Column("effects", String(16), nullable=False, server_default="none"),
    Column("status", String(16), nullable=False, server_default="pending"),
    Column("result", Text, nullable=True),
    Column("error_class", String(32), nullable=True),
    Column("starts", Integer, nullable=False, server_default="0"),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    _text("worker"),
    _seconds("seconds"),
    _number("cpu_seconds"),
    Column("sandbox", String(16), nullable=True),
    Column("exit_status", String(16), nullable=True),
    Column("exit_code", Integer, nullable=True),
    _created(),
    _at("started_at"),
    _at("finished_at"),
    _run_name(),
    UniqueConstraint("episode_id", "attempt", "step", "call"),
    Index("ix_tool_calls_run", "run", "id"),
    _one_of("status", CALL_STATUS),
    _one_of("effects", EFFECTS),
    _one_of("kind", CALL_KINDS),
    CheckConstraint("(status IN ('done', 'unknown_outcome')) = (result IS NOT NULL)", name="finished_has_result"),
    CheckConstraint("(sandbox IS NULL) = (exit_status IS NULL)", name="sandbox_saw_exit"),
)

tool_sessions = Table(
    "tool_sessions",
    metadata,
    Column("episode_id", Id, ForeignKey("episodes.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("tool", String(128), primary_key=True),
    Column("owner", Text, nullable=False, server_default="", index=True),
    Column("lease_until", BigInteger, nullable=True),
    Column("builds", Integer, nullable=False, server_default="1"),
    _text("differs"),
    _created(),
)
"""Who has the interpreter of an episode, by the queue that this process reads; how often one was started for it."""

reward_sets = Table(
    "reward_sets",
    metadata,
    _id(),
    _key("run_id", "runs"),
    Column("name", String(64), nullable=False),
    Column("code_hash", String(32), nullable=False),
    Column("weights", JSON, nullable=False),
    _created(),
    UniqueConstraint("run_id", "name"),
)

rewards = Table(
    "rewards",
    metadata,
    _id(),
    _key("reward_set_id", "reward_sets"),
    _key("episode_id", "episodes", index=True),
    _text("part"),
    Column("value", Float(53), nullable=False),
    Column("weight", Float(53), nullable=False),
    _run_name(),
    UniqueConstraint("reward_set_id", "episode_id", "part"),
    Index("ix_rewards_run", "run", "id"),
)

UPDATE_METRICS = (
    "loss",
    "kl",
    "entropy",
    "ratio",
    "clip_fraction",
    "grad_norm",
    "learning_rate",
    "sampler_difference_mean",
    "sampler_difference_max",
    "importance_weight",
    "importance_truncated",
)
"""The columns of `updates` that measure one optimizer step."""

updates = Table(
    "updates",
    metadata,
    _id(),
    _key("run_id", "runs"),
    _key("iteration_id", "iterations"),
    Column("minibatch", Integer, nullable=False),
    _count("rows"),
    _count("tokens"),
    *(_number(name) for name in UPDATE_METRICS),
    UniqueConstraint("iteration_id", "minibatch"),
)

consumptions = Table(
    "consumptions",
    metadata,
    _id(),
    _key("run_id", "runs"),
    _key("iteration_id", "iterations"),
    _key("episode_id", "episodes", index=True),
    Column("stage", String(16), nullable=False, server_default="train"),
    Column("advantage", Float(53), nullable=False),
    UniqueConstraint("run_id", "episode_id", "stage"),
)

evals = Table(
    "evals",
    metadata,
    _id(),
    Column("run_id", Id, ForeignKey("runs.id"), nullable=False, unique=True),
    _text("policy"),
    _text("dataset"),
    _text("split"),
    _count("episodes"),
    _count("errors"),
    _number("mean_reward"),
    _number("low"),
    _number("high"),
    _created(),
)

events = Table(
    "events",
    metadata,
    _id(),
    _key("run_id", "runs", nullable=True, index=True),
    Column("kind", String(32), nullable=False),
    _text("subject"),
    _text("detail"),
    _created(),
)

service_leases = Table(
    "service_leases",
    metadata,
    Column("name", String(64), primary_key=True),
    _text("holder"),
    Column("lease_until", BigInteger, nullable=False),
)


SET_BACK = 10
"""A lease that ends later than this many of its lives from now was written before the database's clock was set back."""


def free(lease_until: Column[int], seconds: float) -> ColumnElement[bool]:
    """Whether nobody holds a lease of so many seconds, by the database's own clock. One set back keeps nobody waiting long."""
    until = func.coalesce(lease_until, 0)
    return (until < now_ms()) | (until > now_ms() + int(SET_BACK * seconds * 1000))


def first_utc(column: Column[datetime], moment: datetime) -> ColumnElement[datetime]:
    """The column's moment, or `moment` where it has none yet."""
    return func.coalesce(column, literal(moment, Utc()))


TABLES_FOR_READERS = tuple(table for table in metadata.tables if table != "service_leases")
"""What `agentrl_reader` may select from, beside every view."""

ASKED = {column.name for column in tool_calls.primary_key} | {
    *("run", "episode_id", "attempt", "step_id", "step", "call", "tool", "arguments", "kind", "effects", "created_at")
}
"""What of a call is known before it is made; the rest is what became of it."""

RIGHTS_OF_TOOLS = {
    "alembic_version": ["SELECT"],
    "service_leases": ["SELECT"],
    "runs": ["SELECT (id, config)"],
    "episodes": ["SELECT (id, run_id, attempt, status, parent_id, inherited_steps)", "UPDATE (tainted)"],
    "tool_calls": ["SELECT", f"UPDATE ({', '.join(column.name for column in tool_calls.c if column.name not in ASKED)})"],
    "tool_sessions": ["SELECT", "INSERT", "UPDATE"],
}
"""Table -> what `agentrl_tools` may do with it: what a tools worker does, which runs what a model asks for, and no more."""
