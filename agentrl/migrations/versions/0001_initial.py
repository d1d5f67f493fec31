"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates them."""
    op.create_table(
        "runs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=8), server_default="train", nullable=False),
        sa.Column("status", sa.String(length=16), server_default="planned", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.Column("seed", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("dataset", sa.Text(), server_default="", nullable=False),
        sa.Column("base", sa.Text(), server_default="", nullable=False),
        sa.Column("base_hash", sa.Text(), server_default="", nullable=False),
        sa.Column("epochs", sa.Integer(), nullable=False),
        sa.Column("iterations", sa.Integer(), nullable=False),
        sa.Column("output_dir", sa.Text(), server_default="", nullable=False),
        sa.Column("bad_updates", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('train', 'eval')", name=op.f("ck_runs_kind")),
        sa.CheckConstraint(
            "status IN ('planned', 'running', 'paused', 'done', 'failed', 'cancelled')", name=op.f("ck_runs_status")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    op.create_index(op.f("ix_runs_status"), "runs", ["status"], unique=False)
    op.create_table(
        "service_leases",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("holder", sa.Text(), server_default="", nullable=False),
        sa.Column("lease_until", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_service_leases")),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("content_hash", sa.String(length=32), nullable=False),
        sa.Column("key", sa.Text(), server_default="", nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("reference", sa.Text(), server_default="", nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("content_hash", name=op.f("uq_tasks_content_hash")),
    )
    op.create_table(
        "evals",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("policy", sa.Text(), server_default="", nullable=False),
        sa.Column("dataset", sa.Text(), server_default="", nullable=False),
        sa.Column("split", sa.Text(), server_default="", nullable=False),
        sa.Column("episodes", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("errors", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("mean_reward", sa.Float(precision=53), nullable=True),
        sa.Column("low", sa.Float(precision=53), nullable=True),
        sa.Column("high", sa.Float(precision=53), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evals_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evals")),
        sa.UniqueConstraint("run_id", name=op.f("uq_evals_run_id")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.Text(), server_default="", nullable=False),
        sa.Column("detail", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_run_id"), "events", ["run_id"], unique=False)
    op.create_table(
        "policies",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("path", sa.Text(), server_default="", nullable=False),
        sa.Column("sha256", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.CheckConstraint("kind IN ('base', 'trained', 'alias')", name=op.f("ck_policies_kind")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_policies_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
        sa.UniqueConstraint("run_id", "version", name=op.f("uq_policies_run_id_version")),
    )
    op.create_table(
        "reward_sets",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("code_hash", sa.String(length=32), nullable=False),
        sa.Column("weights", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_reward_sets_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reward_sets")),
        sa.UniqueConstraint("run_id", "name", name=op.f("uq_reward_sets_run_id_name")),
    )
    op.create_table(
        "run_tasks",
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("task_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_tasks_run_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_run_tasks_task_id")),
        sa.PrimaryKeyConstraint("run_id", "task_id", name=op.f("pk_run_tasks")),
    )
    op.create_table(
        "iterations",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), server_default="planned", nullable=False),
        sa.Column("policy_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("train_token", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), server_default="", nullable=False),
        sa.Column("train_sent_ms", sa.BigInteger(), nullable=True),
        sa.Column("train_sends", sa.Integer(), server_default="0", nullable=False),
        sa.Column("losses", sa.Integer(), server_default="0", nullable=False),
        sa.Column("too_few", sa.String(length=8), server_default="", nullable=False),
        sa.Column("episodes", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("trainable", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("dropped_groups", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("mean_reward", sa.Float(precision=53), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("tool_calls", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("tool_errors", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("update_seconds", sa.Float(precision=53), nullable=True),
        sa.Column("skipped", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("rolled_out_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("status IN ('planned', 'running', 'done', 'cancelled')", name=op.f("ck_iterations_status")),
        sa.CheckConstraint("too_few IN ('', 'paused', 'accepted')", name=op.f("ck_iterations_too_few")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_iterations_policy_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_iterations_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_iterations")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_iterations_run_id_number")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("iteration_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("task_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=8), server_default="train", nullable=False),
        sa.Column("status", sa.String(length=16), server_default="planned", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), server_default="", nullable=False),
        sa.Column("sent_ms", sa.BigInteger(), nullable=True),
        sa.Column("sends", sa.Integer(), server_default="0", nullable=False),
        sa.Column("losses", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("dropped", sa.Text(), server_default="", nullable=False),
        sa.Column("mean_reward", sa.Float(precision=53), nullable=True),
        sa.Column("std_reward", sa.Float(precision=53), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('train', 'eval', 'fork')", name=op.f("ck_groups_kind")),
        sa.CheckConstraint("status IN ('planned', 'running', 'done', 'cancelled')", name=op.f("ck_groups_status")),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name=op.f("fk_groups_iteration_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_groups_task_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint("iteration_id", "slot", name=op.f("uq_groups_iteration_id_slot")),
    )
    op.create_index(op.f("ix_groups_run_id"), "groups", ["run_id"], unique=False)
    op.create_table(
        "updates",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("iteration_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("minibatch", sa.Integer(), nullable=False),
        sa.Column("rows", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("loss", sa.Float(precision=53), nullable=True),
        sa.Column("kl", sa.Float(precision=53), nullable=True),
        sa.Column("entropy", sa.Float(precision=53), nullable=True),
        sa.Column("ratio", sa.Float(precision=53), nullable=True),
        sa.Column("clip_fraction", sa.Float(precision=53), nullable=True),
        sa.Column("grad_norm", sa.Float(precision=53), nullable=True),
        sa.Column("learning_rate", sa.Float(precision=53), nullable=True),
        sa.Column("sampler_difference_mean", sa.Float(precision=53), nullable=True),
        sa.Column("sampler_difference_max", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name=op.f("fk_updates_iteration_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_updates_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_updates")),
        sa.UniqueConstraint("iteration_id", "minibatch", name=op.f("uq_updates_iteration_id_minibatch")),
    )
    op.create_table(
        "episodes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("iteration_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("group_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("task_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), server_default="planned", nullable=False),
        sa.Column("stop_reason", sa.String(length=16), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("error_class", sa.Text(), server_default="", nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("reward", sa.Float(precision=53), nullable=True),
        sa.Column("final_answer", sa.Text(), server_default="", nullable=False),
        sa.Column("steps", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("tool_calls", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("tool_errors", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("generate_seconds", sa.Float(precision=53), server_default="0", nullable=False),
        sa.Column("tool_seconds", sa.Float(precision=53), server_default="0", nullable=False),
        sa.Column("tainted", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("parent_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("fork_step", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(status = 'done') = (stop_reason IS NOT NULL)", name=op.f("ck_episodes_done_has_stop_reason")),
        sa.CheckConstraint("status <> 'done' OR reward IS NOT NULL", name=op.f("ck_episodes_done_has_reward")),
        sa.CheckConstraint(
            "status IN ('planned', 'running', 'done', 'failed', 'infra_error', 'cancelled')", name=op.f("ck_episodes_status")
        ),
        sa.CheckConstraint("status NOT IN ('failed', 'infra_error') OR error <> ''", name=op.f("ck_episodes_failed_has_error")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_episodes_group_id")),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name=op.f("fk_episodes_iteration_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["episodes.id"], name=op.f("fk_episodes_parent_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_episodes_run_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_episodes_task_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_episodes")),
        sa.UniqueConstraint("group_id", "sample", name=op.f("uq_episodes_group_id_sample")),
    )
    op.create_index(op.f("ix_episodes_iteration_id"), "episodes", ["iteration_id"], unique=False)
    op.create_index("ix_episodes_run_status", "episodes", ["run_id", "status"], unique=False)
    op.create_table(
        "consumptions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("iteration_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("episode_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("stage", sa.String(length=16), server_default="train", nullable=False),
        sa.Column("advantage", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_consumptions_episode_id")),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name=op.f("fk_consumptions_iteration_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_consumptions_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_consumptions")),
        sa.UniqueConstraint("run_id", "episode_id", "stage", name=op.f("uq_consumptions_run_id_episode_id_stage")),
    )
    op.create_index(op.f("ix_consumptions_episode_id"), "consumptions", ["episode_id"], unique=False)
    op.create_table(
        "rewards",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("reward_set_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("episode_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("part", sa.Text(), server_default="", nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_rewards_episode_id")),
        sa.ForeignKeyConstraint(["reward_set_id"], ["reward_sets.id"], name=op.f("fk_rewards_reward_set_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rewards")),
        sa.UniqueConstraint("reward_set_id", "episode_id", "part", name=op.f("uq_rewards_reward_set_id_episode_id_part")),
    )
    op.create_index(op.f("ix_rewards_episode_id"), "rewards", ["episode_id"], unique=False)
    op.create_table(
        "steps",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("episode_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("policy_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("prompt", sa.JSON(), nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("content", sa.Text(), server_default="", nullable=False),
        sa.Column("thought", sa.Text(), server_default="", nullable=False),
        sa.Column("new_row", sa.Text(), nullable=True),
        sa.Column("finish_reason", sa.String(length=8), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), server_default="0", nullable=False),
        sa.Column("logprob_sum", sa.Float(precision=53), server_default="0", nullable=False),
        sa.Column("generate_seconds", sa.Float(precision=53), server_default="0", nullable=False),
        sa.Column("sampled_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("observed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("finish_reason IN ('stop', 'length')", name=op.f("ck_steps_finish_reason")),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_steps_episode_id")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_steps_policy_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_steps")),
        sa.UniqueConstraint("episode_id", "attempt", "number", name=op.f("uq_steps_episode_id_attempt_number")),
    )
    op.create_table(
        "step_tokens",
        sa.Column("step_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False),
        sa.Column("behavior_logprobs", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_step_tokens_step_id")),
        sa.PrimaryKeyConstraint("step_id", name=op.f("pk_step_tokens")),
    )
    op.create_table(
        "tool_calls",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("episode_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("step_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("call", sa.Integer(), nullable=False),
        sa.Column("tool", sa.String(length=128), nullable=False),
        sa.Column("arguments", sa.JSON(), nullable=False),
        sa.Column("effects", sa.String(length=16), server_default="none", nullable=False),
        sa.Column("status", sa.String(length=16), server_default="pending", nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error_class", sa.String(length=32), nullable=True),
        sa.Column("starts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), server_default="", nullable=False),
        sa.Column("seconds", sa.Float(precision=53), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("(CURRENT_TIMESTAMP)"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(status IN ('done', 'unknown_outcome')) = (result IS NOT NULL)", name=op.f("ck_tool_calls_finished_has_result")
        ),
        sa.CheckConstraint("effects IN ('none', 'repeatable', 'once')", name=op.f("ck_tool_calls_effects")),
        sa.CheckConstraint("status IN ('pending', 'started', 'done', 'unknown_outcome')", name=op.f("ck_tool_calls_status")),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_tool_calls_episode_id")),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_tool_calls_step_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tool_calls")),
        sa.UniqueConstraint("episode_id", "attempt", "step", "call", name=op.f("uq_tool_calls_episode_id_attempt_step_call")),
    )
    op.create_index(op.f("ix_tool_calls_step_id"), "tool_calls", ["step_id"], unique=False)
    op.create_index(op.f("ix_tool_calls_tool"), "tool_calls", ["tool"], unique=False)


def downgrade() -> None:
    """Undoes it."""
    op.drop_index(op.f("ix_tool_calls_tool"), table_name="tool_calls")
    op.drop_index(op.f("ix_tool_calls_step_id"), table_name="tool_calls")
    op.drop_table("tool_calls")
    op.drop_table("step_tokens")
    op.drop_table("steps")
    op.drop_index(op.f("ix_rewards_episode_id"), table_name="rewards")
    op.drop_table("rewards")
    op.drop_index(op.f("ix_consumptions_episode_id"), table_name="consumptions")
    op.drop_table("consumptions")
    op.drop_index("ix_episodes_run_status", table_name="episodes")
    op.drop_index(op.f("ix_episodes_iteration_id"), table_name="episodes")
    op.drop_table("episodes")
    op.drop_table("updates")
    op.drop_index(op.f("ix_groups_run_id"), table_name="groups")
    op.drop_table("groups")
    op.drop_table("iterations")
    op.drop_table("run_tasks")
    op.drop_table("reward_sets")
    op.drop_table("policies")
    op.drop_index(op.f("ix_events_run_id"), table_name="events")
    op.drop_table("events")
    op.drop_table("evals")
    op.drop_table("tasks")
    op.drop_table("service_leases")
    op.drop_index(op.f("ix_runs_status"), table_name="runs")
    op.drop_table("runs")
