"""The tables of agentrl with their constraints and indexes, for SQLite and Postgres.

Values by which rows are filtered or grouped are typed columns. Only `step_tokens` has blobs: packed little-endian int32 and
float32 values. No list and no view reads a blob. The blobs also contain the action mask: `prompt_ids` are tokens that the
policy read, and `sampled_ids` are tokens that the policy sampled.

Constraints of the database enforce the invariants, so the invariants do not depend on code. Unique keys make every job
idempotent. Check constraints tie a status to the columns that it requires. Triggers (`create_views`) reject a change of a final
status.
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
    text,
)

from agentrl.workflow.annotations import KINDS as ANNOTATION_KINDS
from agentrl.workflow.annotations import SOURCES as ANNOTATION_SOURCES
from agentrl.workflow.tables.column_values import (
    AGENT_STATUS,
    CALL_KINDS,
    CALL_STATUS,
    EFFECTS,
    EPISODE_STATUS,
    RUN_KINDS,
    RUN_STATUS,
    TASK_ROLES,
    WORK_STATUS,
)
from agentrl.workflow.tables.columns import (
    Id,
    Utc,
    check_one_of,
    count_column,
    created_column,
    float_column,
    id_column,
    place_columns,
    reference_column,
    run_name_column,
    seconds_column,
    text_column,
    time_column,
)
from agentrl.workflow.trajectory import WHOLE

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


runs = Table(
    "runs",
    metadata,
    id_column(),
    Column("name", String(64), nullable=False, unique=True),
    Column("kind", String(8), nullable=False, server_default="train"),
    Column("status", String(16), nullable=False, server_default="planned", index=True),
    text_column("reason"),
    Column("config", JSON, nullable=False),
    Column("manifest", JSON, nullable=False),
    Column("seed", Id, nullable=False),
    text_column("dataset"),
    text_column("base"),
    text_column("base_hash"),
    Column("epochs", Integer, nullable=False),
    Column("iterations", Integer, nullable=False),
    text_column("output_dir"),
    Column("bad_updates", Integer, nullable=False, server_default="0"),
    Column("reward_set", String(64), nullable=False, server_default="default"),
    reference_column("measures_id", "runs", nullable=True),
    Column("measures_version", Integer, nullable=True),
    Column("format", Integer, nullable=False),
    created_column(),
    time_column("started_at"),
    time_column("finished_at"),
    time_column("tokens_removed_at"),
    UniqueConstraint("measures_id", "measures_version"),
    check_one_of("status", RUN_STATUS),
    check_one_of("kind", RUN_KINDS),
)

tasks = Table(
    "tasks",
    metadata,
    id_column(),
    Column("content_hash", String(32), nullable=False, unique=True),
    text_column("key"),
    Column("messages", JSON, nullable=False),
    text_column("reference"),
    Column("metadata", JSON, nullable=False),
)

run_tasks = Table(
    "run_tasks",
    metadata,
    Column("run_id", Id, ForeignKey("runs.id"), primary_key=True),
    Column("task_id", Id, ForeignKey("tasks.id"), primary_key=True),
    Column("role", String(8), nullable=False, server_default="train"),
    Column("difficulty", Float(53), nullable=True),
    check_one_of("role", TASK_ROLES),
)
"""The tasks of a run. A search run uses some of its tasks to choose texts, and other tasks to measure the chosen texts.

In each epoch the tasks are ordered by `difficulty`, lowest first. Tasks without a difficulty come last, in an order that the
seed decides.
"""

run_groups = Table(
    "run_groups",
    metadata,
    Column("run_id", Id, ForeignKey("runs.id"), primary_key=True),
    Column("group_id", Id, ForeignKey("groups.id"), primary_key=True),
)
"""The stored groups on which a run trains, if it samples no groups itself."""

run_tags = Table(
    "run_tags",
    metadata,
    Column("run_id", Id, ForeignKey("runs.id"), primary_key=True),
    Column("tag", String(64), primary_key=True, index=True),
    created_column(),
)
"""Tags of runs: words that people attach to a run so they find it again."""

run_notes = Table(
    "run_notes",
    metadata,
    id_column(),
    reference_column("run_id", "runs", index=True),
    Column("text", Text, nullable=False),
    created_column(),
)
"""Notes on runs: texts that people wrote."""

reports = Table(
    "reports",
    metadata,
    Column("run_id", Id, ForeignKey("runs.id"), primary_key=True),
    Column("tracker", String(128), primary_key=True),
    text_column("handle"),
    text_column("url"),
    Column("samples", Integer, nullable=False, server_default="0"),
    Column("iteration", Integer, nullable=False, server_default="0"),
    Column("status", String(16), nullable=False, server_default=""),
    text_column("error"),
    created_column(),
)
"""The trackers to which a run is reported: the run's id in the tracker, the last iteration that was written, and the last
status of the run that was written.
"""

policies = Table(
    "policies",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    Column("version", Integer, nullable=False),
    Column("kind", String(8), nullable=False),
    text_column("path"),
    text_column("sha256"),
    time_column("collected_at"),
    text_column("broken"),
    created_column(),
    UniqueConstraint("run_id", "version"),
    check_one_of("kind", ("base", "trained", "alias")),
    Index("ix_policies_path", "path"),
)

UPDATE_COSTS = ("peak_memory_bytes", "tflops", "mfu")
"""The columns of `iterations` for the cost of an update, except its duration in seconds."""

iterations = Table(
    "iterations",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    Column("number", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("status", String(16), nullable=False, server_default="planned"),
    reference_column("policy_id", "policies"),
    Column("train_token", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    text_column("worker"),
    Column("train_sent_ms", BigInteger, nullable=True),
    Column("train_sends", Integer, nullable=False, server_default="0"),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("too_few", String(8), nullable=False, server_default=""),
    count_column("episodes"),
    count_column("trainable"),
    count_column("dropped_groups"),
    count_column("more_groups"),
    float_column("mean_reward"),
    count_column("prompt_tokens"),
    count_column("sampled_tokens"),
    count_column("tool_calls"),
    count_column("tool_errors"),
    float_column("update_seconds"),
    *(float_column(name) for name in UPDATE_COSTS),
    text_column("skipped"),
    created_column(),
    time_column("started_at"),
    time_column("rolled_out_at"),
    time_column("finished_at"),
    UniqueConstraint("run_id", "number"),
    check_one_of("status", WORK_STATUS),
    check_one_of("too_few", ("", "paused", "accepted")),
)

groups = Table(
    "groups",
    metadata,
    id_column(),
    reference_column("run_id", "runs", index=True),
    reference_column("iteration_id", "iterations"),
    reference_column("task_id", "tasks"),
    Column("slot", Integer, nullable=False),
    Column("kind", String(8), nullable=False, server_default="train"),
    Column("status", String(16), nullable=False, server_default="planned"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    text_column("worker"),
    Column("sent_ms", BigInteger, nullable=True),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("failures", Integer, nullable=False, server_default="0"),
    text_column("dropped"),
    Column("opening", JSON(none_as_null=True), nullable=True),
    Column("prompt_step_id", Id, nullable=True),
    Column("prompt_hash", String(32), nullable=True),
    text_column("address"),
    float_column("mean_reward"),
    float_column("std_reward"),
    float_column("best_reward"),
    float_column("worst_reward"),
    Column("solved", Integer, nullable=True),
    time_column("started_at"),
    time_column("finished_at"),
    UniqueConstraint("iteration_id", "slot"),
    check_one_of("status", WORK_STATUS),
    check_one_of("kind", RUN_KINDS),
)

iteration_groups = Table(
    "iteration_groups",
    metadata,
    Column("iteration_id", Id, ForeignKey("iterations.id"), primary_key=True),
    Column("slot", Integer, primary_key=True, autoincrement=False),
    reference_column("group_id", "groups", index=True),
    text_column("dropped"),
)
"""The stored groups on which an iteration trains, in a run that samples no groups itself."""

IS_FORK = text("parent_id IS NOT NULL")
"""The condition of the partial index of forks. Few episodes are forks."""
episodes = Table(
    "episodes",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    reference_column("iteration_id", "iterations", index=True),
    reference_column("group_id", "groups"),
    reference_column("task_id", "tasks"),
    Column("sample", Integer, nullable=False),
    Column("status", String(16), nullable=False, server_default="planned"),
    Column("stop_reason", String(16), nullable=True),
    Column("attempt", Integer, nullable=False, server_default="0"),
    text_column("error_class"),
    text_column("error"),
    float_column("reward"),
    text_column("final_answer"),
    Column("answer_step", Integer, nullable=True),
    count_column("steps"),
    count_column("prompt_tokens"),
    count_column("sampled_tokens"),
    count_column("tool_calls"),
    count_column("tool_errors"),
    seconds_column("generate_seconds"),
    seconds_column("tool_seconds"),
    Column("tainted", Boolean, nullable=False, server_default="0"),
    reference_column("parent_id", "episodes", nullable=True),
    Column("fork_step", Integer, nullable=True),
    Column("inherited_steps", Integer, nullable=False, server_default="0"),
    created_column(),
    time_column("started_at"),
    time_column("finished_at"),
    UniqueConstraint("group_id", "sample"),
    check_one_of("status", EPISODE_STATUS),
    CheckConstraint("(status = 'done') = (stop_reason IS NOT NULL)", name="done_has_stop_reason"),
    CheckConstraint("status <> 'done' OR reward IS NOT NULL", name="done_has_reward"),
    CheckConstraint("status NOT IN ('failed', 'infra_error') OR error <> ''", name="failed_has_error"),
    Index("ix_episodes_run_status", "run_id", "status"),
    Index("ix_episodes_run", "run_id", "id"),
    Index("ix_episodes_parent_id", "parent_id", sqlite_where=IS_FORK, postgresql_where=IS_FORK),
)
"""The episodes. If a long final answer is the content of a step of the episode, `answer_step` is the step's number, and
`final_answer` has only the first characters, by which lists are sorted.
"""

request_options = Table(
    "request_options",
    metadata,
    id_column(),
    Column("content_hash", String(64), nullable=False, unique=True),
    Column("tools", JSON, nullable=False),
    Column("template_options", JSON, nullable=False),
)
"""The tools and template options in agents' requests; each combination is stored once."""

steps = Table(
    "steps",
    metadata,
    id_column(),
    reference_column("episode_id", "episodes"),
    Column("attempt", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    reference_column("policy_id", "policies"),
    Column("prompt_step_id", Id, nullable=True),
    Column("prompt", JSON, nullable=False),
    text_column("text"),
    text_column("content"),
    *place_columns("content"),
    text_column("thought"),
    *place_columns("thought"),
    text_column("new_row", default=None),
    Column("chain", Integer, nullable=False, server_default="0"),
    Column("parent_step", Integer, nullable=True),
    Column("shared_tokens", Integer, nullable=True),
    Column("request_id", String(64), nullable=True),
    Column("request_hash", String(64), nullable=True),
    Column("delivered", Boolean, nullable=False, server_default="1"),
    Column("replayed", Boolean, nullable=False, server_default="0"),
    Column("side_call", Boolean, nullable=False, server_default="0"),
    Column("asked", JSON(none_as_null=True), nullable=True),
    reference_column("options_id", "request_options", nullable=True),
    Column("finish_reason", String(8), nullable=False),
    count_column("prompt_tokens"),
    count_column("sampled_tokens"),
    seconds_column("logprob_sum"),
    seconds_column("generate_seconds"),
    Column("sampled_at", Utc, nullable=False),
    time_column("observed_at"),
    run_name_column(),
    UniqueConstraint("episode_id", "attempt", "number"),
    UniqueConstraint("episode_id", "attempt", "request_id"),
    Index("ix_steps_run", "run", "id"),
    check_one_of("finish_reason", ("stop", "length")),
)
"""The steps. The first steps of a group's episodes usually have the same prompt, which is stored once: `prompt_step_id` is the
id of the group's step that has the `prompt` and `prompt_ids` of this step, whose own are empty; NULL if this step has them.
`groups.prompt_step_id` is the step that the group's next first steps may name, and `groups.prompt_hash` the hash of its prompt.

`prompt_step_id` is no foreign key: a database would search both tables for each step that it deletes. A group's steps are
deleted together.
"""

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
    id_column(),
    reference_column("episode_id", "episodes"),
    reference_column("step_id", "steps", index=True),
    Column("attempt", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("call", Integer, nullable=False),
    Column("tool", String(128), nullable=False, index=True),
    Column("arguments", JSON, nullable=False),
    Column("loose", Boolean, nullable=False, server_default="0"),
    Column("kind", String(8), nullable=False, server_default="call"),
    Column("effects", String(16), nullable=False, server_default="none"),
    Column("status", String(16), nullable=False, server_default="pending"),
    Column("result", Text, nullable=True),
    Column("error_class", String(32), nullable=True),
    Column("starts", Integer, nullable=False, server_default="0"),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("lease_until", BigInteger, nullable=True),
    text_column("worker"),
    seconds_column("seconds"),
    float_column("cpu_seconds"),
    Column("sandbox", String(16), nullable=True),
    Column("exit_status", String(16), nullable=True),
    Column("exit_code", Integer, nullable=True),
    Column("annotations", JSON(none_as_null=True), nullable=True),
    created_column(),
    time_column("started_at"),
    time_column("finished_at"),
    run_name_column(),
    UniqueConstraint("episode_id", "attempt", "step", "call"),
    Index("ix_tool_calls_run", "run", "id"),
    check_one_of("status", CALL_STATUS),
    check_one_of("effects", EFFECTS),
    check_one_of("kind", CALL_KINDS),
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
    text_column("differs"),
    created_column(),
)
"""The sessions of episodes' interpreters: the worker that owns the interpreter, by the name of the worker's queue, and the
number of times that an interpreter was started.
"""

agent_attempts = Table(
    "agent_attempts",
    metadata,
    id_column(),
    reference_column("episode_id", "episodes"),
    Column("attempt", Integer, nullable=False),
    Column("status", String(16), nullable=False, server_default="pending"),
    Column("key_hash", String(64), nullable=True, unique=True),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("sent_ms", BigInteger, nullable=True),
    Column("lease_until", BigInteger, nullable=True),
    text_column("worker"),
    Column("exit_code", Integer, nullable=True),
    text_column("error_class"),
    text_column("error"),
    Column("answer", Text, nullable=True),
    Column("rewards", JSON(none_as_null=True), nullable=True),
    text_column("output"),
    created_column(),
    time_column("started_at"),
    time_column("finished_at"),
    run_name_column(),
    UniqueConstraint("episode_id", "attempt"),
    Index("ix_agent_attempts_run", "run", "id"),
    Index("ix_agent_attempts_status", "status", "id"),
    check_one_of("status", AGENT_STATUS),
    CheckConstraint("status <> 'running' OR key_hash IS NOT NULL", name="running_has_key"),
)
"""The attempts of agents at episodes. Each attempt has one process; the row says how it ended."""

annotations = Table(
    "annotations",
    metadata,
    id_column(),
    reference_column("episode_id", "episodes"),
    Column("attempt", Integer, nullable=False),
    Column("emission", String(64), nullable=False),
    Column("step", Integer, nullable=True),
    Column("source", String(8), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("name", String(128), nullable=False),
    Column("data", JSON, nullable=False),
    Column("seconds", Float(53), nullable=True),
    created_column(),
    run_name_column(),
    UniqueConstraint("episode_id", "attempt", "emission"),
    Index("ix_annotations_run", "run", "id"),
    check_one_of("source", ANNOTATION_SOURCES),
    check_one_of("kind", ANNOTATION_KINDS),
)
"""The annotations that agents, tools and hooks wrote to episodes. An annotation is stored once per attempt, even if it is sent
again, and is never changed.
"""

resources = Table(
    "resources",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    Column("name", String(128), nullable=False),
    Column("version", Integer, nullable=False),
    Column("content_hash", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("parent_version", Integer, nullable=True),
    text_column("note"),
    Column("chosen", Boolean, nullable=False, server_default="0"),
    created_column(),
    UniqueConstraint("run_id", "name", "version"),
    UniqueConstraint("run_id", "name", "content_hash"),
)
"""The texts of a run, such as prompts, in all versions. Version 0 is the text in the run's config; a search tried the later
versions. `chosen` marks the version that a search chose.
"""

group_resources = Table(
    "group_resources",
    metadata,
    Column("group_id", Id, ForeignKey("groups.id"), primary_key=True),
    Column("resource_id", Id, ForeignKey("resources.id"), primary_key=True, index=True),
)
"""The versions of texts that the episodes of each group use."""

critic_calls = Table(
    "critic_calls",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    Column("key", String(64), nullable=False),
    text_column("model"),
    Column("messages", JSON, nullable=False),
    Column("answer", Text, nullable=False),
    seconds_column("seconds"),
    created_column(),
    UniqueConstraint("run_id", "key"),
)
"""The requests of a search to its critic, and the critic's answers. The answer to a request is stored once, so a process that
continues the search does not send the request again.
"""

reward_sets = Table(
    "reward_sets",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    Column("name", String(64), nullable=False),
    Column("code_hash", String(32), nullable=False),
    Column("weights", JSON, nullable=False),
    created_column(),
    UniqueConstraint("run_id", "name"),
)

rewards = Table(
    "rewards",
    metadata,
    id_column(),
    reference_column("reward_set_id", "reward_sets"),
    reference_column("episode_id", "episodes", index=True),
    text_column("part"),
    Column("step", Integer, nullable=False, server_default=str(WHOLE)),
    Column("value", Float(53), nullable=False),
    Column("weight", Float(53), nullable=False),
    run_name_column(),
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
    "importance_outside",
    "effective_sample_size",
    "policy_kl",
    "kl_coef",
    "value_loss",
    "explained_variance",
    "log_ratio_clamped",
)
"""The columns of `updates` that contain the metrics of an optimizer step."""

updates = Table(
    "updates",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    reference_column("iteration_id", "iterations"),
    Column("minibatch", Integer, nullable=False),
    count_column("rows"),
    count_column("tokens"),
    *(float_column(name) for name in UPDATE_METRICS),
    UniqueConstraint("iteration_id", "minibatch"),
)

consumptions = Table(
    "consumptions",
    metadata,
    id_column(),
    reference_column("run_id", "runs"),
    reference_column("iteration_id", "iterations", index=True),
    reference_column("episode_id", "episodes", index=True),
    Column("stage", String(16), nullable=False, server_default="train"),
    Column("advantage", Float(53), nullable=False),
    UniqueConstraint("run_id", "episode_id", "stage"),
)

evals = Table(
    "evals",
    metadata,
    id_column(),
    Column("run_id", Id, ForeignKey("runs.id"), nullable=False, unique=True),
    text_column("policy"),
    text_column("dataset"),
    text_column("split"),
    count_column("episodes"),
    count_column("errors"),
    float_column("mean_reward"),
    float_column("low"),
    float_column("high"),
    count_column("tasks"),
    float_column("accuracy"),
    Column("pass_at", JSON(none_as_null=True), nullable=True),
    Column("interval_by", String(16), nullable=True),
    created_column(),
)

events = Table(
    "events",
    metadata,
    id_column(),
    reference_column("run_id", "runs", nullable=True, index=True),
    Column("kind", String(32), nullable=False),
    text_column("subject"),
    text_column("detail"),
    created_column(),
)

service_leases = Table(
    "service_leases",
    metadata,
    Column("name", String(64), primary_key=True),
    text_column("holder"),
    Column("lease_until", BigInteger, nullable=False),
)

rank_meetings = Table(
    "rank_meetings",
    metadata,
    id_column(),
    text_column("address"),
    Column("devices", String(8), nullable=False),
    Column("numerics", String(8), nullable=False),
    Column("token", String(64), nullable=False),
    Column("lease_until", BigInteger, nullable=False),
)
"""Where train workers wait for the other hosts of an update. A train worker writes a row, waits at `address`, and deletes the
row. With `token`, another host joins the update, so nobody but workers may read it.
"""


machine_loads = Table(
    "machine_loads",
    metadata,
    Column("slot", Id, primary_key=True, autoincrement=False),
    Column("host", String(64), primary_key=True),
    float_column("cpu_share"),
    Column("memory_used", Id, nullable=True),
    Column("memory_total", Id, nullable=True),
    Column("gpus", JSON(none_as_null=True), nullable=True),
    Column("waiting_rollout", Id, nullable=True),
    Column("waiting_train", Id, nullable=True),
    Column("waiting_tools", Id, nullable=True),
    float_column("tokens_per_second"),
    created_column(),
)
"""The load of each host, for an hour. `slot` is the time in units of `reads.load_rows.SLOT_SECONDS` since 1970, by the
database's clock. Only the host of the control loop counts the waiting work and the tokens, of all hosts.
"""


TABLES_FOR_READERS = tuple(table for table in metadata.tables if table not in ("service_leases", "rank_meetings"))
"""The tables that the role `agentrl_reader` may read. It may also read all views."""

FIXED_CALL_COLUMNS = {column.name for column in tool_calls.primary_key} | {
    *("run", "episode_id", "attempt", "step_id", "step", "call", "tool", "arguments", "loose", "kind", "effects"),
    "created_at",
}
"""The columns of a tool call that are written before it runs. The other columns contain its outcome."""

RIGHTS_OF_TOOLS = {
    "alembic_version": ["SELECT"],
    "service_leases": ["SELECT"],
    "runs": ["SELECT (id, config)"],
    "episodes": ["SELECT (id, run_id, attempt, status, parent_id, inherited_steps)", "UPDATE (tainted)"],
    "tool_calls": [
        "SELECT",
        f"UPDATE ({', '.join(column.name for column in tool_calls.c if column.name not in FIXED_CALL_COLUMNS)})",
    ],
    "tool_sessions": ["SELECT", "INSERT", "UPDATE"],
}
"""The rights of the role `agentrl_tools`, by table. They are the minimum that a tools worker needs, because that worker runs
what a model requests.
"""

FIXED_AGENT_COLUMNS = {*("id", "run", "episode_id", "attempt", "sends", "sent_ms", "created_at")}
"""The columns of `agent_attempts` that an agents worker may not change. The other columns contain the worker's claim and the
outcome.
"""

RIGHTS_OF_AGENTS = {
    "alembic_version": ["SELECT"],
    "service_leases": ["SELECT"],
    "runs": ["SELECT (id, name, kind, config, format)"],
    "tasks": ["SELECT (id, key, messages, metadata)"],
    "episodes": ["SELECT (id, run_id, group_id, task_id, attempt, status, parent_id)"],
    "group_resources": ["SELECT (group_id, resource_id)"],
    "resources": ["SELECT (id, name, text)"],
    "agent_attempts": [
        "SELECT",
        f"UPDATE ({', '.join(column.name for column in agent_attempts.c if column.name not in FIXED_AGENT_COLUMNS)})",
    ],
}
"""The rights of the role `agentrl_agents`, by table. They are the minimum that an agents worker needs. They exclude the tasks'
references.
"""
