"""What the rows promise, as queries for SQLite and Postgres: for runs whose iterations have 2 groups x 2 episodes.

Those called `one` have max_staleness 1 and dynamic sampling of up to twice as many groups.
"""

from typing import Any

from sqlalchemy import select, text

from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import MAX_LOSSES
from agentrl.workflow.tables import schema as tables
from tests.support.played_runs import value, values

GIVE_UP = 3
"""Attempts of a group or an update that fail before they are given up."""

PROMISED = {
    "run": "SELECT id, status FROM runs WHERE status IN ('done', 'cancelled')",
    "iteration": "SELECT id, status, mean_reward FROM iterations WHERE status IN ('done', 'cancelled')",
    "group": "SELECT id, status, mean_reward FROM groups WHERE status IN ('done', 'cancelled')",
    "episode": "SELECT id, status, reward, attempt, steps FROM episodes WHERE status NOT IN ('planned', 'running')",
    "step": "SELECT s.id, episode_id, attempt, number, policy_id, text, prompt_ids, sampled_ids, behavior_logprobs "
    "FROM steps s JOIN step_tokens t ON t.step_id = s.id",
    "observation": "SELECT id, observed_at FROM steps WHERE observed_at IS NOT NULL",
    "call": "SELECT id, episode_id, attempt, step, call, tool FROM tool_calls",
    "result": "SELECT id, status, result, error_class, seconds FROM tool_calls WHERE result IS NOT NULL",
    "reward": "SELECT id, reward_set_id, episode_id, part, step, value FROM rewards",
    "policy": "SELECT id, run_id, version, path, sha256 FROM policies",
    "consumption": "SELECT id, run_id, iteration_id, episode_id, advantage FROM consumptions",
}
"""What is so once stays so for ever; the first column names it."""

OPEN = "('planned', 'running')"
VARIED = (
    "(SELECT count(*) FROM (SELECT 1 FROM episodes e WHERE e.iteration_id = i.id AND e.status = 'done' GROUP BY e.group_id "
    "HAVING min(e.reward) < max(e.reward)) AS varied)"
)
BROKEN = (
    "SELECT episode_id FROM consumptions GROUP BY run_id, episode_id HAVING count(*) > 1",
    "SELECT c.id FROM consumptions c JOIN episodes e ON e.id = c.episode_id WHERE e.status <> 'done'",
    "SELECT group_id FROM episodes GROUP BY group_id HAVING count(*) <> 2 OR count(DISTINCT sample) <> 2",
    "SELECT i.id FROM groups g JOIN iterations i ON i.id = g.iteration_id GROUP BY i.id, i.more_groups, i.episodes "
    "HAVING count(*) <> 2 + i.more_groups OR count(DISTINCT task_id) <> count(*) OR i.episodes <> 2 * count(*)",
    "SELECT i.id FROM iterations i JOIN runs r ON r.id = i.run_id "
    "WHERE more_groups > CASE WHEN r.name = 'one' THEN 2 ELSE 0 END",
    f"SELECT i.id FROM iterations i JOIN runs r ON r.id = i.run_id WHERE r.name = 'one' AND i.status = 'done' "
    f"AND too_few = '' AND more_groups < 2 AND {VARIED} < 2",
    f"SELECT i.id FROM iterations i JOIN groups g ON g.iteration_id = i.id WHERE i.status = 'done' AND g.status IN {OPEN}",
    f"SELECT g.id FROM groups g JOIN episodes e ON e.group_id = g.id WHERE g.status = 'done' AND e.status IN {OPEN}",
    f"SELECT g.id FROM groups g WHERE g.status IN {OPEN} AND NOT EXISTS "
    f"(SELECT 1 FROM episodes e WHERE e.group_id = g.id AND e.status IN {OPEN})",
    "SELECT run_id FROM policies GROUP BY run_id HAVING count(*) <> max(version) + 1",
    "SELECT run_id FROM policies p GROUP BY run_id HAVING count(*) <> 1 + "
    "(SELECT count(*) FROM iterations i WHERE i.run_id = p.run_id AND i.status = 'done')",
    "SELECT i.id FROM iterations i JOIN runs r ON r.id = i.run_id JOIN policies p ON p.id = i.policy_id WHERE p.version <> "
    "CASE WHEN r.name = 'one' AND i.number > 0 THEN i.number - 1 ELSE i.number END",
    "SELECT s.id FROM steps s JOIN episodes e ON e.id = s.episode_id JOIN iterations i ON i.id = e.iteration_id "
    "WHERE s.policy_id <> i.policy_id",
    f"SELECT i.id FROM iterations i JOIN iterations o ON o.run_id = i.run_id AND o.number < i.number "
    f"WHERE i.status = 'done' AND o.status IN {OPEN}",
    "SELECT episode_id FROM steps GROUP BY episode_id, attempt HAVING count(*) <> max(number) + 1",
    "SELECT e.id FROM episodes e WHERE steps <> "
    "(SELECT count(*) FROM steps s WHERE s.episode_id = e.id AND s.attempt = e.attempt)",
    "SELECT e.id FROM episodes e WHERE tool_calls <> "
    "(SELECT count(*) FROM tool_calls c WHERE c.episode_id = e.id AND c.attempt = e.attempt AND c.kind = 'call')",
    "SELECT id FROM tool_calls WHERE effects = 'once' AND starts > 1",
    "SELECT s.id FROM steps s JOIN tool_calls c ON c.step_id = s.id "
    "WHERE s.observed_at IS NOT NULL AND c.kind = 'call' AND c.result IS NULL",
    "SELECT e.id FROM episodes e JOIN groups g ON g.id = e.group_id "
    f"WHERE e.status = 'infra_error' AND g.losses < {MAX_LOSSES} AND g.failures < {GIVE_UP}",
)
"""Queries that never find a row."""

COMPLETE = {
    "SELECT (SELECT sum(episodes) FROM iterations i WHERE i.run_id = r.id) - "
    f"(SELECT count(*) FROM episodes e WHERE e.run_id = r.id AND status NOT IN {OPEN}) FROM runs r WHERE r.id = :run": 0,
    "SELECT iterations - (SELECT count(*) FROM iterations i WHERE i.run_id = r.id AND i.status = 'done') "
    "FROM runs r WHERE r.id = :run": 0,
    "SELECT iterations - (SELECT max(version) FROM policies p WHERE p.run_id = r.id) FROM runs r WHERE r.id = :run": 0,
    "SELECT count(*) FROM episodes e WHERE run_id = :run AND status = 'done' "
    "AND NOT EXISTS (SELECT 1 FROM consumptions c WHERE c.episode_id = e.id) "
    "AND NOT EXISTS (SELECT 1 FROM groups g WHERE g.id = e.group_id AND g.dropped <> '')": 0,
}
"""What each run that is done has of each."""


def check_promises(db: Database, seen: dict[Any, Any]) -> None:
    """Fails where the rows break a promise now, or differ from what was `seen` of them before (kept there)."""
    with db.read() as tx:
        rows = {name: tx.execute(text(query)).all() for name, query in PROMISED.items()}
        broken = {query: found for query in BROKEN if (found := tx.execute(text(query)).all())}
    for name, found in rows.items():
        for key, *kept in found:
            assert seen.setdefault((name, key), kept) == kept, f"{name} {key} changed"
        assert len(found) == sum(known == name for known, _ in seen), f"a row of {name} is gone"
    assert broken == {}


def check_complete(db: Database) -> None:
    """Fails where a run is done and something of it was lost."""
    for run in values(db, "SELECT id FROM runs WHERE status = 'done'"):
        for query, expected in COMPLETE.items():
            assert value(db, query, run=run) == expected, query


def dump(db: Database) -> dict[str, list[Any]]:
    """Every row of every table."""
    with db.read() as tx:
        return {table.name: list(tx.execute(select(table)).all()) for table in tables.metadata.sorted_tables}
