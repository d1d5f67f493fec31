"""Steps of agents that are driven from outside: chains, requests, attempts; and which way a run's draws are keyed.

A step of before continues the one before it, unless it began a new row of tokens; runs of before keep their keys.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
STEP_COLUMNS: dict[str, tuple[sa.types.TypeEngine[Any], str | None]] = {
    "chain": (sa.Integer(), "0"),
    "parent_step": (sa.Integer(), None),
    "shared_tokens": (sa.Integer(), None),
    "request_id": (sa.String(length=64), None),
    "request_hash": (sa.String(length=64), None),
    "delivered": (sa.Boolean(), "1"),
    "asked": (sa.JSON(), None),
    "options_id": (ID, None),
}
"""Name -> type, and the value in steps of before; None: it may be NULL."""
KINDS = {"runs": "'train', 'eval', 'fork'", "groups": "'train', 'eval', 'fork'", "tool_calls": "'call', 'grade'"}
MORE_KINDS = {"runs": "'serve'", "groups": "'serve'", "tool_calls": "'agent'"}
CALL_STATUS = "'pending', 'started', 'done', 'unknown_outcome'"


def upgrade() -> None:
    """Adds them."""
    op.create_table(
        "request_options",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("tools", sa.JSON(), nullable=False),
        sa.Column("template_options", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_request_options")),
        sa.UniqueConstraint("content_hash", name=op.f("uq_request_options_content_hash")),
    )
    op.create_table(
        "agent_attempts",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("episode_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), server_default="pending", nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=True),
        sa.Column("sends", sa.Integer(), server_default="0", nullable=False),
        sa.Column("sent_ms", sa.BigInteger(), nullable=True),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), server_default="", nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("error_class", sa.Text(), server_default="", nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("rewards", sa.JSON(), nullable=True),
        sa.Column("output", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.CheckConstraint("status IN ('pending', 'running', 'ended', 'lost')", name=op.f("ck_agent_attempts_status")),
        sa.CheckConstraint("status <> 'running' OR key_hash IS NOT NULL", name=op.f("ck_agent_attempts_running_has_key")),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_agent_attempts_episode_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_agent_attempts")),
        sa.UniqueConstraint("episode_id", "attempt", name=op.f("uq_agent_attempts_episode_id_attempt")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_agent_attempts_key_hash")),
    )
    op.create_index(op.f("ix_agent_attempts_run"), "agent_attempts", ["run", "id"])
    for table, kinds in KINDS.items():
        with alter_table(table) as altered:
            altered.drop_constraint(op.f(f"ck_{table}_kind"), type_="check")
            altered.create_check_constraint(op.f(f"ck_{table}_kind"), f"kind IN ({kinds}, {MORE_KINDS[table]})")
            if table == "runs":
                altered.add_column(sa.Column("key_scheme", sa.Integer(), server_default="1", nullable=False))
            if table == "groups":
                altered.add_column(sa.Column("address", sa.Text(), server_default="", nullable=False))
            if table == "tool_calls":
                altered.drop_constraint(op.f("ck_tool_calls_status"), type_="check")
                altered.create_check_constraint(op.f("ck_tool_calls_status"), f"status IN ({CALL_STATUS}, 'unobserved')")
    with alter_table("steps") as steps:
        for name, (kind, default) in STEP_COLUMNS.items():
            steps.add_column(sa.Column(name, kind, server_default=default, nullable=default is None))
        steps.create_foreign_key(op.f("fk_steps_options_id"), "request_options", ["options_id"], ["id"])
        key = ["episode_id", "attempt", "request_id"]
        steps.create_unique_constraint(op.f("uq_steps_episode_id_attempt_request_id"), key)
    op.execute("UPDATE steps SET parent_step = number - 1 WHERE number > 0 AND new_row IS NULL")


def downgrade() -> None:
    """Removes them; older code reads what is left as its own.

    A step that goes on from another one than the step before it has its whole prompt again. What agents ran themselves counts
    as run by tools, or is removed where nobody saw its result. What was served is an evaluation, cancelled if it was not over.
    That a turn was never read is not known any more.
    """
    _write_prompts_whole(op.get_bind())
    for table in ("episodes", "groups", "iterations"):
        of_served = "run_id IN (SELECT id FROM runs WHERE kind = 'serve')"
        op.execute(f"UPDATE {table} SET status = 'cancelled' WHERE status IN ('planned', 'running') AND {of_served}")
    op.execute("UPDATE runs SET status = 'cancelled' WHERE status NOT IN ('done', 'failed', 'cancelled') AND kind = 'serve'")
    for table in ("groups", "runs"):
        op.execute(f"UPDATE {table} SET kind = 'eval' WHERE kind = 'serve'")
    op.execute("DELETE FROM tool_calls WHERE kind = 'agent' AND result IS NULL")
    op.execute("UPDATE tool_calls SET kind = 'call' WHERE kind = 'agent'")
    with alter_table("steps") as steps:
        steps.drop_constraint(op.f("uq_steps_episode_id_attempt_request_id"), type_="unique")
        steps.drop_constraint(op.f("fk_steps_options_id"), type_="foreignkey")
        for name in reversed(STEP_COLUMNS):
            steps.drop_column(name)
    for table, kinds in KINDS.items():
        with alter_table(table) as altered:
            altered.drop_constraint(op.f(f"ck_{table}_kind"), type_="check")
            altered.create_check_constraint(op.f(f"ck_{table}_kind"), f"kind IN ({kinds})")
            if table == "runs":
                altered.drop_column("key_scheme")
            if table == "groups":
                altered.drop_column("address")
            if table == "tool_calls":
                altered.drop_constraint(op.f("ck_tool_calls_status"), type_="check")
                altered.create_check_constraint(op.f("ck_tool_calls_status"), f"status IN ({CALL_STATUS})")
    op.drop_table("agent_attempts")
    op.drop_table("request_options")


_STEPS = sa.table(
    "steps",
    *(sa.column(name, sa.BigInteger()) for name in ("id", "episode_id", "attempt", "number", "parent_step", "shared_tokens")),
    *(sa.column(name, sa.Text()) for name in ("content", "thought", "new_row")),
    *(sa.column(name, sa.Integer()) for name in ("chain", "prompt_tokens")),
    sa.column("prompt", sa.JSON()),
)
_TOKENS = sa.table(
    "step_tokens",
    sa.column("step_id", sa.BigInteger()),
    *(sa.column(name, sa.LargeBinary()) for name in ("prompt_ids", "sampled_ids")),
)
_CALLS = sa.table(
    "tool_calls",
    *(sa.column(name, sa.BigInteger()) for name in ("step_id", "call")),
    *(sa.column(name, sa.Text()) for name in ("kind", "tool", "result", "error_class")),
    sa.column("arguments", sa.JSON()),
)
ID_BYTES = 4


def _write_prompts_whole(connection: sa.Connection) -> None:
    """Gives each step that does not go on from the one before it all of its prompt, as the first one of a row of tokens."""
    elsewhere = (_STEPS.c.chain > 0) | _STEPS.c.shared_tokens.is_not(None)
    several = sa.select(_STEPS.c.episode_id, _STEPS.c.attempt).where(elsewhere).distinct()
    for episode, attempt in connection.execute(several).all():
        _write_episode_whole(connection, (_STEPS.c.episode_id == episode) & (_STEPS.c.attempt == attempt))


def _write_episode_whole(connection: sa.Connection, of_episode: sa.ColumnElement[bool]) -> None:
    query = sa.select(_STEPS, _TOKENS.c.prompt_ids, _TOKENS.c.sampled_ids).join(_TOKENS, _TOKENS.c.step_id == _STEPS.c.id)
    lines: dict[int, tuple[bytes, list[Any]]] = {}  # number of a step -> the tokens and the messages of its line
    for row in connection.execute(query.where(of_episode).order_by(_STEPS.c.number)).all():
        tokens, told = lines.get(row.parent_step, (b"", []))
        before = tokens if row.shared_tokens is None else tokens[: row.shared_tokens * ID_BYTES]
        prompt_ids = before + row.prompt_ids
        shares = bool(row.prompt) and "shared" in row.prompt[0]
        prompt = [*told[: row.prompt[0]["shared"]], *row.prompt[1:]] if shares else row.prompt
        prompt = prompt if row.shared_tokens is not None else [*told, *prompt]
        lines[row.number] = (prompt_ids + row.sampled_ids, [*prompt, _said(connection, row)])
        goes_on = row.parent_step == row.number - 1 and row.shared_tokens is None and row.new_row is None
        if goes_on or row.number == 0:
            continue
        values = {"prompt": prompt, "prompt_tokens": len(prompt_ids) // ID_BYTES}
        values["new_row"] = row.new_row or f"it goes on from step {row.parent_step}"
        connection.execute(sa.update(_STEPS).where(_STEPS.c.id == row.id).values(values))
        connection.execute(sa.update(_TOKENS).where(_TOKENS.c.step_id == row.id).values(prompt_ids=prompt_ids))


def _said(connection: sa.Connection, row: Any) -> dict[str, Any]:
    """The step's own message, as a prompt has it."""
    said: dict[str, Any] = {"role": "assistant", "content": row.content}
    if row.thought:
        said["thought"] = row.thought
    mine = sa.select(_CALLS).where(_CALLS.c.step_id == row.id, _CALLS.c.kind == "agent").order_by(_CALLS.c.call)
    calls: list[dict[str, Any]] = []
    for call in connection.execute(mine):
        made = {"name": call.tool, "arguments": call.arguments}
        calls.append(made | {"error": call.result} if call.error_class == "parse_error" else made)
    return said | {"tool_calls": calls} if calls else said
