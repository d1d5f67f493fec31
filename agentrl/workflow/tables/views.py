"""Views and functions for people, and the triggers that keep terminal states terminal: SQL that every migration recreates.

A view joins the tables that a question needs, with a researcher's names; none reads a blob. A table that carries the run's name
comes first, by CROSS JOIN, because SQLite keeps that order whatever its statistics say. An episode's attempt equals that of its
newest rows; `<=` is written because Postgres, without statistics, expects next to no rows of `=`. It would also begin with the
index on a status, which is therefore asked in a FILTER where groups lead to the episodes. `staleness` is the number of versions
by which the trainer was ahead of the policy that sampled (NULL where nothing was sampled for an update of the run).
Iterations and epochs are counted from 1, so that iteration k makes policy version k; the tables, and the keys of all draws,
count them from 0. `eval_reward` is the mean on the held-out split: for an iteration, of the version it sampled with
(`policy_version`); for a run, of the newest version evaluated. The triggers refuse to move an episode, group, iteration or run
out of a terminal state, whoever writes.
"""

from typing import TYPE_CHECKING

from agentrl.workflow.stats.group_variance import CUT_OFF, DIFFERENT, NO_VARIANCE, SURPLUS
from agentrl.workflow.trajectory import TERMINAL, TRUNCATED

if TYPE_CHECKING:
    from sqlalchemy import Connection

_FATES = """
        SELECT r.name AS run, i.number + 1 AS iteration, e.id AS episode_id, t.key AS task, {slot} AS slot, e.sample,
               c.advantage, {dropped} AS dropped, i.skipped,
               CASE WHEN e.status IN ('planned', 'running') THEN 'open'
                    WHEN e.status <> 'done' THEN e.status
                    WHEN r.kind = 'eval' THEN 'evaluated'
                    WHEN r.kind = 'fork' THEN 'forked'
                    WHEN r.kind = 'search' THEN 'searched'
                    WHEN r.kind = 'serve' THEN 'served'
                    WHEN r.kind = 'import' THEN 'imported'
                    WHEN c.id IS NULL AND i.status = 'cancelled' THEN 'cancelled'
                    WHEN c.id IS NULL AND i.status <> 'done' THEN 'waiting'
                    WHEN c.id IS NULL AND e.tainted THEN 'tainted'
                    WHEN c.id IS NULL AND {dropped} = '{no_variance}' THEN 'no_variance'
                    WHEN c.id IS NULL AND {dropped} = '{surplus}' THEN 'surplus'
                    WHEN c.id IS NULL AND {dropped} <> '' THEN 'too_few'
                    WHEN c.id IS NULL THEN 'no_reward'
                    WHEN c.advantage = 0 AND NOT EXISTS (  -- a critic's values were trained on them all the same
                      SELECT 1 FROM updates u WHERE u.iteration_id = i.id AND u.value_loss IS NOT NULL)
                      AND NOT EXISTS (  -- a value for each sibling, and no join: one that began with the run would read it all
                      SELECT 1 FROM episodes sibling WHERE sibling.group_id = e.group_id AND 0 <> (
                        SELECT other.advantage FROM consumptions other WHERE other.run_id = i.run_id
                        AND other.episode_id = sibling.id AND other.stage = 'train'))
                      AND ({dropped} = '' OR EXISTS (  -- else all that could have taught something strayed
                      SELECT 1 FROM groups flat WHERE flat.id = e.group_id AND flat.std_reward = 0)) THEN 'no_variance'
                    WHEN c.advantage = 0 AND {dropped} LIKE '%{cut_off}%' AND e.stop_reason IN ({truncated}) THEN 'truncated'
                    WHEN c.advantage = 0 AND {dropped} LIKE '%{different}%' THEN 'strayed'
                    WHEN i.skipped <> '' THEN 'skipped'
                    ELSE 'trained' END AS fate
        FROM {members}
        JOIN runs r ON r.id = i.run_id
        JOIN tasks t ON t.id = e.task_id
        LEFT JOIN consumptions c ON c.run_id = i.run_id AND c.episode_id = e.id AND c.stage = 'train'"""
_OWN_EPISODES = "iterations i JOIN groups g ON g.iteration_id = i.id JOIN episodes e ON e.group_id = g.id"
_STORED_EPISODES = "iterations i JOIN iteration_groups g ON g.iteration_id = i.id JOIN episodes e ON e.group_id = g.group_id"

_EVALS_OF_RUN = """
        FROM runs m JOIN evals v ON v.run_id = m.id
        WHERE m.measures_id = r.id AND v.mean_reward IS NOT NULL AND v.errors <= v.episodes"""  # too few episodes tell little
_BEST_EVAL = f"{_EVALS_OF_RUN} ORDER BY v.mean_reward DESC, m.measures_version LIMIT 1"
_NEWEST_EVAL = f"{_EVALS_OF_RUN} ORDER BY m.measures_version DESC LIMIT 1"

_METRICS = (
    "loss", "kl", "policy_kl", "entropy", "clip_fraction", "grad_norm", "value_loss", "explained_variance",
    "sampler_difference_mean", "sampler_difference_max", "importance_outside", "importance_weight", "importance_truncated",
    "effective_sample_size", "log_ratio_clamped",
)  # fmt: skip
_UPDATE_COLUMNS = ", ".join(  # one subquery each: a join would aggregate all iterations to show one
    f"(SELECT {'max' if name.endswith('_max') else 'avg'}(u.{name}) FROM updates u WHERE u.iteration_id = i.id) AS {name}"
    for name in _METRICS
)

VIEWS = {
    "v_runs": f"""
        SELECT r.id, r.name AS run, r.kind, r.status, r.reason, r.dataset, r.base AS model, r.seed, r.epochs, r.iterations,
               (SELECT count(*) FROM iterations i WHERE i.run_id = r.id AND i.status = 'done') AS iterations_done,
               (SELECT max(p.version) FROM policies p WHERE p.run_id = r.id) AS policy_version,
               (SELECT count(*) FROM episodes e WHERE e.run_id = r.id AND e.status = 'done') AS episodes_done,
               (SELECT i.mean_reward FROM iterations i WHERE i.run_id = r.id AND i.mean_reward IS NOT NULL
                ORDER BY i.number DESC LIMIT 1) AS last_reward,
               (SELECT v.mean_reward {_NEWEST_EVAL}) AS eval_reward, (SELECT v.mean_reward {_BEST_EVAL}) AS best_reward,
               (SELECT m.measures_version {_BEST_EVAL}) AS best_version,
               (SELECT m.name FROM runs m WHERE m.id = r.measures_id) AS measures,
               r.created_at, r.started_at, r.finished_at, {{seconds:r.started_at,r.finished_at}} AS seconds
        FROM runs r""",
    "v_evals": """
        SELECT r.id, r.name AS run, m.name AS measures, p.version AS policy_version, r.status, r.reason, r.dataset, v.split,
               v.tasks, v.episodes, v.errors, v.mean_reward, v.low, v.high, v.interval_by, v.accuracy, v.pass_at,
               v.policy, r.created_at, r.finished_at
        FROM runs r
        JOIN policies p ON p.run_id = r.id
        LEFT JOIN evals v ON v.run_id = r.id
        LEFT JOIN runs m ON m.id = r.measures_id
        WHERE r.kind = 'eval'""",
    "v_iterations": f"""
        SELECT i.id, r.name AS run, i.epoch + 1 AS epoch, i.number + 1 AS iteration, i.status, i.skipped, i.episodes,
               i.trainable, i.dropped_groups, i.more_groups,
               (SELECT count(*) FROM groups g WHERE g.iteration_id = i.id) AS groups,
               (SELECT count(*) FROM groups g WHERE g.iteration_id = i.id AND g.std_reward = 0) AS flat_groups,
               i.mean_reward, p.version AS policy_version,
               (SELECT v.mean_reward FROM runs m JOIN evals v ON v.run_id = m.id
                WHERE m.measures_id = r.id AND m.measures_version = p.version) AS eval_reward,
               CASE WHEN r.kind = 'train' AND EXISTS (SELECT 1 FROM groups g WHERE g.iteration_id = i.id)
                    THEN i.number - p.version END AS staleness, {_UPDATE_COLUMNS},
               i.prompt_tokens + i.sampled_tokens AS tokens, i.prompt_tokens,
               i.sampled_tokens, i.tool_calls, i.tool_errors, i.update_seconds, i.peak_memory_bytes, i.tflops, i.mfu,
               {{seconds:i.started_at,i.rolled_out_at}} AS rollout_seconds,
               {{seconds:i.started_at,i.finished_at}} AS seconds, i.started_at, i.finished_at
        FROM iterations i
        JOIN runs r ON r.id = i.run_id
        JOIN policies p ON p.id = i.policy_id""",
    "v_groups": """
        SELECT g.id, r.name AS run, i.number + 1 AS iteration, g.slot, g.kind, g.status, g.dropped, t.key AS task, t.reference,
               g.mean_reward, g.std_reward, g.attempt, g.losses, g.failures, g.worker, g.started_at, g.finished_at,
               {seconds:g.started_at,g.finished_at} AS seconds
        FROM groups g
        JOIN runs r ON r.id = g.run_id
        JOIN iterations i ON i.id = g.iteration_id
        JOIN tasks t ON t.id = g.task_id""",
    "v_episodes": """
        SELECT e.id, r.name AS run, i.epoch + 1 AS epoch, i.number + 1 AS iteration, g.slot, e.sample, t.key AS task,
               e.status, e.stop_reason, e.reward, c.advantage, e.final_answer, t.reference, p.version AS policy_version,
               CASE WHEN r.kind = 'train' THEN i.number - p.version END AS staleness, e.steps, e.prompt_tokens,
               e.sampled_tokens, e.tool_calls, e.tool_errors, e.generate_seconds, e.tool_seconds,
               {seconds:e.started_at,e.finished_at} AS seconds, e.error_class, e.error, e.tainted, e.attempt, e.parent_id,
               e.fork_step, e.inherited_steps, e.group_id, e.started_at, e.finished_at
        FROM episodes e
        JOIN runs r ON r.id = e.run_id
        JOIN iterations i ON i.id = e.iteration_id
        JOIN groups g ON g.id = e.group_id
        JOIN tasks t ON t.id = e.task_id
        JOIN policies p ON p.id = i.policy_id
        LEFT JOIN consumptions c ON c.episode_id = e.id AND c.run_id = e.run_id AND c.stage = 'train'""",
    "v_steps": """
        SELECT s.id, s.run, i.number + 1 AS iteration, s.episode_id, s.number AS step, s.attempt, s.thought, s.content,
               s.text, s.finish_reason, s.prompt_tokens, s.sampled_tokens,
               s.logprob_sum / nullif(s.sampled_tokens, 0) AS mean_logprob, s.generate_seconds, p.version AS policy_version,
               CASE WHEN r.kind = 'train' THEN i.number - p.version END AS staleness, s.new_row, s.chain, s.parent_step,
               s.shared_tokens, s.delivered, s.request_id, s.sampled_at, s.observed_at
        FROM steps s CROSS JOIN episodes e CROSS JOIN iterations i CROSS JOIN runs r CROSS JOIN policies p
        WHERE e.id = s.episode_id AND e.attempt <= s.attempt AND i.id = e.iteration_id AND r.id = i.run_id
        AND p.id = s.policy_id""",
    "v_tool_calls": """
        SELECT c.id, c.run, i.number + 1 AS iteration, c.episode_id, c.step, c.call, c.kind, c.tool, c.arguments, c.loose,
               c.status, c.result, c.error_class, c.effects, c.starts, c.sends AS attempts, c.seconds, c.cpu_seconds,
               {seconds:c.created_at,c.started_at} AS queue_seconds, c.sandbox, c.exit_status, c.exit_code,
               c.worker, c.created_at, c.started_at, c.finished_at
        FROM tool_calls c CROSS JOIN episodes e CROSS JOIN iterations i
        WHERE e.id = c.episode_id AND e.attempt <= c.attempt AND i.id = e.iteration_id""",
    "v_tool_sessions": """
        SELECT r.name AS run, i.number + 1 AS iteration, s.episode_id, s.attempt, s.tool, s.owner, s.builds, s.differs,
               e.tainted, s.created_at
        FROM tool_sessions s
        JOIN episodes e ON e.id = s.episode_id
        JOIN iterations i ON i.id = e.iteration_id
        JOIN runs r ON r.id = e.run_id""",
    "v_agent_attempts": """
        SELECT a.id, a.run, i.number + 1 AS iteration, a.episode_id, a.attempt, a.status, a.worker, a.exit_code,
               nullif(a.error_class, '') AS error_class, a.error, a.answer, a.sends AS attempts,
               {seconds:a.started_at,a.finished_at} AS seconds, a.created_at, a.started_at, a.finished_at
        FROM agent_attempts a CROSS JOIN episodes e CROSS JOIN iterations i
        WHERE e.id = a.episode_id AND i.id = e.iteration_id""",
    "v_annotations": """
        SELECT a.id, a.run, i.number + 1 AS iteration, a.episode_id, a.attempt, a.step, a.source, a.kind, a.name, a.data,
               a.seconds, a.created_at
        FROM annotations a CROSS JOIN episodes e CROSS JOIN iterations i
        WHERE e.id = a.episode_id AND e.attempt <= a.attempt AND i.id = e.iteration_id""",
    "v_resources": """
        SELECT v.id, r.name AS run, v.name, v.version, v.parent_version, v.note, v.chosen, v.text,
               (SELECT count(*) FILTER (WHERE e.run_id = v.run_id AND e.status = 'done')
                FROM group_resources l CROSS JOIN episodes e
                WHERE l.resource_id = v.id AND e.group_id = l.group_id) AS episodes_done,
               (SELECT avg(e.reward) FILTER (WHERE e.run_id = v.run_id AND e.status = 'done')
                FROM group_resources l CROSS JOIN episodes e
                WHERE l.resource_id = v.id AND e.group_id = l.group_id) AS mean_reward,
               (SELECT avg(CASE WHEN e.status = 'done' AND 'choose' =
                  (SELECT m.role FROM run_tasks m WHERE m.run_id = e.run_id AND m.task_id = e.task_id) THEN e.reward END)
                FROM group_resources l CROSS JOIN episodes e
                WHERE l.resource_id = v.id AND e.group_id = l.group_id) AS choose_reward, v.created_at
        FROM resources v
        JOIN runs r ON r.id = v.run_id""",
    "v_episode_resources": """
        SELECT r.name AS run, e.id AS episode_id, v.name, v.version, m.role, e.status, e.reward
        FROM group_resources l
        JOIN resources v ON v.id = l.resource_id
        JOIN episodes e ON e.group_id = l.group_id
        JOIN runs r ON r.id = e.run_id
        JOIN run_tasks m ON m.run_id = e.run_id AND m.task_id = e.task_id""",
    "v_critic_calls": """
        SELECT c.id, r.name AS run, c.model, c.messages, c.answer, c.seconds, c.created_at
        FROM critic_calls c
        JOIN runs r ON r.id = c.run_id""",
    "v_rewards": """
        SELECT w.id, w.run, i.number + 1 AS iteration, w.episode_id, t.key AS task, s.name AS reward_set, w.part,
               CASE WHEN w.step >= 0 THEN w.step END AS step, w.value, w.weight
        FROM rewards w CROSS JOIN reward_sets s CROSS JOIN episodes e CROSS JOIN iterations i CROSS JOIN tasks t
        WHERE s.id = w.reward_set_id AND e.id = w.episode_id AND i.id = e.iteration_id AND t.id = e.task_id""",
    "v_updates": """
        SELECT u.id, r.name AS run, i.epoch + 1 AS epoch, i.number + 1 AS iteration, u.minibatch, u.rows, u.tokens, u.loss,
               u.kl, u.entropy, u.clip_fraction, u.ratio, u.grad_norm, u.learning_rate, u.policy_kl, u.kl_coef, u.value_loss,
               u.explained_variance, u.sampler_difference_mean,
               u.sampler_difference_max, u.importance_outside, u.importance_weight, u.importance_truncated,
               u.effective_sample_size, u.log_ratio_clamped
        FROM updates u
        JOIN iterations i ON i.id = u.iteration_id
        JOIN runs r ON r.id = i.run_id""",
    # The fate of each planned episode, in its own run and in runs that trained on it as a stored one.
    "v_ledger": " UNION ALL ".join(
        _FATES.format(
            slot="g.slot",
            dropped="g.dropped",
            members=members,
            no_variance=NO_VARIANCE,
            surplus=SURPLUS,
            cut_off=CUT_OFF,
            different=DIFFERENT,
            truncated=", ".join(f"'{reason}'" for reason in TRUNCATED),
        )
        for members in (_OWN_EPISODES, _STORED_EPISODES)
    ),
}

FUNCTIONS = {
    "rl_i4": "bits",
    "rl_f4": """
        CASE WHEN (bits >> 23) & 255 = 255 THEN NULL ELSE
          (CASE WHEN bits < 0 THEN -1.0::float8 ELSE 1.0::float8 END)
          * (CASE WHEN (bits >> 23) & 255 = 0 THEN (bits & 8388607) * power(2::float8, -149)
             ELSE ((bits & 8388607) + 8388608) * power(2::float8, ((bits >> 23) & 255) - 150) END) END""",
}
"""Postgres function -> the value of one packed little-endian word; SQLite's are made by `store.reads.user_sql`."""

LENGTHENED = {"runs": "OLD.status = 'done' AND NEW.status = 'running' AND NEW.iterations > OLD.iterations"}
"""Table -> the one exception to FINAL_STATUSES: a run that is done may be made longer."""

FINAL_STATUSES = {
    "episodes": sorted(TERMINAL),
    "groups": ["cancelled", "done"],
    "iterations": ["cancelled", "done"],
    "runs": ["cancelled", "done"],
}
"""Table -> statuses that no update may leave. A failed run may be resumed."""


def create(tx: "Connection") -> None:
    """Make every view and trigger."""
    from sqlalchemy import text

    for name, query in VIEWS.items():
        tx.execute(text(f"CREATE VIEW {name} AS {_dialect(query, tx.dialect.name)}"))
    if tx.dialect.name == "postgresql":
        for name, value in FUNCTIONS.items():
            tx.execute(text(_unpack_function(name, value)))
    for table, statuses in FINAL_STATUSES.items():
        for statement in _guard_triggers(table, statuses, tx.dialect.name):
            tx.execute(text(statement))


def drop(tx: "Connection") -> None:
    """Remove every view and trigger, whether or not they exist: a migration runs without them."""
    from sqlalchemy import text

    for name in VIEWS:
        tx.execute(text(f"DROP VIEW IF EXISTS {name}"))
    if tx.dialect.name == "postgresql":
        for name in FUNCTIONS:
            tx.execute(text(f"DROP FUNCTION IF EXISTS {name}(bytea)"))
    for table in FINAL_STATUSES:
        if tx.dialect.name == "postgresql":
            tx.execute(text(f"DROP FUNCTION IF EXISTS guard_{table}() CASCADE"))
        else:
            tx.execute(text(f"DROP TRIGGER IF EXISTS guard_{table}"))


def _dialect(query: str, dialect: str) -> str:
    head, *parts = query.split("{seconds:")
    pieces = [head]
    for part in parts:
        moments, rest = part.split("}", 1)
        start, end = moments.split(",")
        if dialect == "postgresql":
            pieces.append(f"extract(epoch FROM ({end} - {start}))::float8{rest}")
        else:
            pieces.append(f"((julianday({end}) - julianday({start})) * 86400.0){rest}")
    return "".join(pieces)


def _unpack_function(name: str, value: str) -> str:
    word = " | ".join(f"(get_byte(blob, 4 * i + {byte}) << {8 * byte})" for byte in range(4))
    return f"""
        CREATE FUNCTION {name}(blob bytea) RETURNS text LANGUAGE sql IMMUTABLE STRICT AS $$
          SELECT coalesce('[' || string_agg(coalesce(({value})::text, 'null'), ', ' ORDER BY i) || ']', '[]')
          FROM (SELECT i, {word} AS bits FROM generate_series(0, length(blob) / 4 - 1) AS i) AS words
        $$"""


def _guard_triggers(table: str, statuses: list[str], dialect: str) -> list[str]:
    listed = ", ".join(f"'{status}'" for status in statuses)
    condition = f"OLD.status IN ({listed}) AND NEW.status <> OLD.status"
    condition += f" AND NOT ({LENGTHENED[table]})" if table in LENGTHENED else ""
    message = f"a finished row of {table} keeps its status"
    if dialect == "postgresql":
        return [
            f"CREATE FUNCTION guard_{table}() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{message}' USING ERRCODE = 'check_violation'; END $$",
            f"CREATE TRIGGER guard_{table} BEFORE UPDATE OF status ON {table} FOR EACH ROW "
            f"WHEN ({condition}) EXECUTE FUNCTION guard_{table}()",
        ]
    return [
        f"CREATE TRIGGER guard_{table} BEFORE UPDATE OF status ON {table} FOR EACH ROW "
        f"WHEN {condition} BEGIN SELECT RAISE(ABORT, '{message}'); END"
    ]
