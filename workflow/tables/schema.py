"""The rows: every table, constraint, index and view of agentrl, for SQLite and Postgres alike.

Typed columns for whatever one filters or groups by; packed little-endian int32 and float32 blobs only in `step_tokens`, so that
no list or view reads a blob. There the column is the action mask: `prompt_ids` were given to the policy, `sampled_ids` are its
own. Constraints, not code, keep the invariants: unique keys make every job idempotent, checks bind a status to what must be
known in it, triggers keep terminal states terminal.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from agentrl.workflow.tables.columns import (
    Id,
    Utc,
    count,
    created,
    key,
    moment,
    number,
    one_of,
    own_id,
    run_name,
    seconds,
    words,
)
from agentrl.workflow.trajectory import TRANSITIONS, WHOLE

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


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
    own_id(),
    Column("name", String(64), nullable=False, unique=True),
    Column("kind", String(8), nullable=False, server_default="train"),
    Column("status", String(16), nullable=False, server_default="planned", index=True),
    words("reason"),
    Column("config", JSON, nullable=False),
    Column("manifest", JSON, nullable=False),
    Column("seed", Id, nullable=False),
    words("dataset"),
    words("base"),
    words("base_hash"),
    Column("epochs", Integer, nullable=False),
    Column("iterations", Integer, nullable=False),
    words("output_dir"),
    Column("bad_updates", Integer, nullable=False, server_default="0"),
    Column("reward_set", String(64), nullable=False, server_default="default"),
    key("measures_id", "runs", nullable=True),
    Column("measures_version", Integer, nullable=True),
    created(),
    moment("started_at"),
    moment("finished_at"),
    UniqueConstraint("measures_id", "measures_version"),
    one_of("status", RUN_STATUS),
    one_of("kind", ("train", "eval", "fork")),
)

tasks = Table(
    "tasks",
    metadata,
    own_id(),
    Column("content_hash", String(32), nullable=False, unique=True),
    words("key"),
    Column("messages", JSON, nullable=False),
    words("reference"),
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
    own_id(),
    key("run_id", "runs"),
    Column("version", Integer, nullable=False),
    Column("kind", String(8), nullable=False),
    words("path"),
    words("sha256"),
    moment("collected_at"),
    words("broken"),
    created(),
    UniqueConstraint("run_id", "version"),
    one_of("kind", ("base", "trained", "alias")),
    Index("ix_policies_path", "path"),
)

iterations = Table(
    "iterations",
    metadata,
    own_id(),
    key("run_id", "runs"),
    Column("number", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("status", String(16), nullable=False, server_default="planned"),
    key("policy_id", "policies"),
    Column("train_token", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    words("worker"),
    Column("train_sent_ms", BigInteger, nullable=True),
    Column("train_sends", Integer, nullable=False, server_default="0"),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("too_few", String(8), nullable=False, server_default=""),
    count("episodes"),
    count("trainable"),
    count("dropped_groups"),
    count("more_groups"),
    number("mean_reward"),
    count("prompt_tokens"),
    count("sampled_tokens"),
    count("tool_calls"),
    count("tool_errors"),
    number("update_seconds"),
    words("skipped"),
    created(),
    moment("started_at"),
    moment("rolled_out_at"),
    moment("finished_at"),
    UniqueConstraint("run_id", "number"),
    one_of("status", WORK_STATUS),
    one_of("too_few", ("", "paused", "accepted")),
)

groups = Table(
    "groups",
    metadata,
    own_id(),
    key("run_id", "runs", index=True),
    key("iteration_id", "iterations"),
    key("task_id", "tasks"),
    Column("slot", Integer, nullable=False),
    Column("kind", String(8), nullable=False, server_default="train"),
    Column("status", String(16), nullable=False, server_default="planned"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    words("worker"),
    Column("sent_ms", BigInteger, nullable=True),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("failures", Integer, nullable=False, server_default="0"),
    words("dropped"),
    Column("opening", JSON(none_as_null=True), nullable=True),
    number("mean_reward"),
    number("std_reward"),
    moment("started_at"),
    moment("finished_at"),
    UniqueConstraint("iteration_id", "slot"),
    one_of("status", WORK_STATUS),
    one_of("kind", ("train", "eval", "fork")),
)

iteration_groups = Table(
    "iteration_groups",
    metadata,
    Column("iteration_id", Id, ForeignKey("iterations.id"), primary_key=True),
    Column("slot", Integer, primary_key=True, autoincrement=False),
    key("group_id", "groups", index=True),
    words("dropped"),
)
"""The stored groups of one iteration of such a run."""

episodes = Table(
    "episodes",
    metadata,
    own_id(),
    key("run_id", "runs"),
    key("iteration_id", "iterations", index=True),
    key("group_id", "groups"),
    key("task_id", "tasks"),
    Column("sample", Integer, nullable=False),
    Column("status", String(16), nullable=False, server_default="planned"),
    Column("stop_reason", String(16), nullable=True),
    Column("attempt", Integer, nullable=False, server_default="0"),
    words("error_class"),
    words("error"),
    number("reward"),
    words("final_answer"),
    count("steps"),
    count("prompt_tokens"),
    count("sampled_tokens"),
    count("tool_calls"),
    count("tool_errors"),
    seconds("generate_seconds"),
    seconds("tool_seconds"),
    Column("tainted", Boolean, nullable=False, server_default="0"),
    key("parent_id", "episodes", nullable=True, index=True),
    Column("fork_step", Integer, nullable=True),
    Column("inherited_steps", Integer, nullable=False, server_default="0"),
    created(),
    moment("started_at"),
    moment("finished_at"),
    UniqueConstraint("group_id", "sample"),
    one_of("status", EPISODE_STATUS),
    CheckConstraint("(status = 'done') = (stop_reason IS NOT NULL)", name="done_has_stop_reason"),
    CheckConstraint("status <> 'done' OR reward IS NOT NULL", name="done_has_reward"),
    CheckConstraint("status NOT IN ('failed', 'infra_error') OR error <> ''", name="failed_has_error"),
    Index("ix_episodes_run_status", "run_id", "status"),
    Index("ix_episodes_run", "run_id", "id"),
)

steps = Table(
    "steps",
    metadata,
    own_id(),
    key("episode_id", "episodes"),
    Column("attempt", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    key("policy_id", "policies"),
    Column("prompt", JSON, nullable=False),
    words("text"),
    words("content"),
    words("thought"),
    words("new_row", default=None),
    Column("finish_reason", String(8), nullable=False),
    count("prompt_tokens"),
    count("sampled_tokens"),
    seconds("logprob_sum"),
    seconds("generate_seconds"),
    Column("sampled_at", Utc, nullable=False),
    moment("observed_at"),
    run_name(),
    UniqueConstraint("episode_id", "attempt", "number"),
    Index("ix_steps_run", "run", "id"),
    one_of("finish_reason", ("stop", "length")),
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
    own_id(),
    key("episode_id", "episodes"),
    key("step_id", "steps", index=True),
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
    words("worker"),
    seconds("seconds"),
    number("cpu_seconds"),
    Column("sandbox", String(16), nullable=True),
    Column("exit_status", String(16), nullable=True),
    Column("exit_code", Integer, nullable=True),
    created(),
    moment("started_at"),
    moment("finished_at"),
    run_name(),
    UniqueConstraint("episode_id", "attempt", "step", "call"),
    Index("ix_tool_calls_run", "run", "id"),
    one_of("status", CALL_STATUS),
    one_of("effects", EFFECTS),
    one_of("kind", CALL_KINDS),
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
    words("differs"),
    created(),
)
"""Who has the interpreter of an episode, by the queue that this process reads; how often one was started for it."""

reward_sets = Table(
    "reward_sets",
    metadata,
    own_id(),
    key("run_id", "runs"),
    Column("name", String(64), nullable=False),
    Column("code_hash", String(32), nullable=False),
    Column("weights", JSON, nullable=False),
    created(),
    UniqueConstraint("run_id", "name"),
)

rewards = Table(
    "rewards",
    metadata,
    own_id(),
    key("reward_set_id", "reward_sets"),
    key("episode_id", "episodes", index=True),
    words("part"),
    Column("step", Integer, nullable=False, server_default=str(WHOLE)),
    Column("value", Float(53), nullable=False),
    Column("weight", Float(53), nullable=False),
    run_name(),
    UniqueConstraint("reward_set_id", "episode_id", "part", "step"),
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
    "policy_kl",
    "kl_coef",
    "value_loss",
    "explained_variance",
)
"""The columns of `updates` that measure one optimizer step."""

updates = Table(
    "updates",
    metadata,
    own_id(),
    key("run_id", "runs"),
    key("iteration_id", "iterations"),
    Column("minibatch", Integer, nullable=False),
    count("rows"),
    count("tokens"),
    *(number(name) for name in UPDATE_METRICS),
    UniqueConstraint("iteration_id", "minibatch"),
)

consumptions = Table(
    "consumptions",
    metadata,
    own_id(),
    key("run_id", "runs"),
    key("iteration_id", "iterations", index=True),
    key("episode_id", "episodes", index=True),
    Column("stage", String(16), nullable=False, server_default="train"),
    Column("advantage", Float(53), nullable=False),
    UniqueConstraint("run_id", "episode_id", "stage"),
)

evals = Table(
    "evals",
    metadata,
    own_id(),
    Column("run_id", Id, ForeignKey("runs.id"), nullable=False, unique=True),
    words("policy"),
    words("dataset"),
    words("split"),
    count("episodes"),
    count("errors"),
    number("mean_reward"),
    number("low"),
    number("high"),
    count("tasks"),
    number("accuracy"),
    Column("pass_at", JSON(none_as_null=True), nullable=True),
    Column("interval_by", String(16), nullable=True),
    created(),
)

events = Table(
    "events",
    metadata,
    own_id(),
    key("run_id", "runs", nullable=True, index=True),
    Column("kind", String(32), nullable=False),
    words("subject"),
    words("detail"),
    created(),
)

service_leases = Table(
    "service_leases",
    metadata,
    Column("name", String(64), primary_key=True),
    words("holder"),
    Column("lease_until", BigInteger, nullable=False),
)


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
