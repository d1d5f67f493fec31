"""The versions of a run's prompts, as in `v_resources`, read one page at a time."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import cursor_error, decode_cursor, encode_cursor, is_id
from agentrl.workflow.store.reads.run_rows import run_id_and_name

KIND = "prompts"
MAX_PROMPTS = 50
"""The most versions of a page."""
MAX_GROUPS = 2500
"""The most groups whose episodes are counted for one page."""


@dataclass(frozen=True, slots=True)
class PromptsPage:
    """Some versions; `next` is the cursor of those that follow, `left_out` counts versions with too many groups to read: what
    they earned is None."""

    rows: Sequence[Mapping[str, Any]]
    next: str
    left_out: int


@sql_read_transaction
def list_prompts(tx: Any, run: str, size: int, cursor: str = "") -> PromptsPage:
    """At most MAX_PROMPTS versions in the order in which they were first tried.

    Raises:
        NotFoundError: there is no such run.
        ConfigError: no cursor of this list.
    """
    size = min(size, MAX_PROMPTS)
    found = run_id_and_name(tx, run)
    query = """
        SELECT id, name, version, parent_version, note, chosen, text, created_at FROM resources
        WHERE run_id = :id AND id > :last ORDER BY id LIMIT :limit"""
    rows = select_rows(tx, query, id=found["id"], last=_parse_cursor(cursor, found["id"]), limit=size + 1)
    shown = rows[:size]
    sums = _load_sums(tx, found["id"], [row["id"] for row in shown])
    told = [{**row, "run": found["name"], **sums.get(row["id"], _UNREAD)} for row in shown]
    following = encode_cursor(KIND, found["id"], shown[-1]["id"]) if len(rows) > size else ""
    return PromptsPage(told, following, sum(row["episodes_done"] is None for row in told))


_UNREAD: Mapping[str, Any] = {"groups": None, "episodes_done": None, "mean_reward": None, "choose_reward": None}


def _load_sums(tx: Any, run_id: int, versions: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Version -> its groups, and what their done episodes came to; of as many versions as have MAX_GROUPS groups."""
    query = f"""
        SELECT resource_id, group_id FROM group_resources WHERE resource_id IN ({among(versions)})
        ORDER BY resource_id LIMIT {MAX_GROUPS + 1}"""
    pairs = select_rows(tx, query)
    unread = pairs[-1]["resource_id"] if len(pairs) > MAX_GROUPS else None
    groups: dict[int, list[int]] = {version: [] for version in versions if unread is None or version < unread}
    for pair in pairs:
        if pair["resource_id"] in groups:
            groups[pair["resource_id"]].append(pair["group_id"])
    rewards = _load_rewards(tx, run_id, {group for its in groups.values() for group in its})
    return {version: _sum_up(its, rewards) for version, its in groups.items()}


def _load_rewards(tx: Any, run_id: int, groups: Collection[int]) -> dict[int, Row]:
    """The run's own groups: the role of its task, the number and the sum of the rewards of its done episodes."""
    done = "FILTER (WHERE status = 'done')"  # as a condition, a Postgres without statistics would look for all that are done
    query = f"""
        SELECT g.id, m.role, e.episodes, e.reward FROM
          (SELECT group_id, count(*) {done} AS episodes, sum(reward) {done} AS reward FROM episodes
           WHERE group_id IN ({among(groups)}) GROUP BY group_id HAVING count(*) {done} > 0) e
        JOIN groups g ON g.id = e.group_id LEFT JOIN run_tasks m ON m.run_id = g.run_id AND m.task_id = g.task_id
        WHERE g.run_id = :id"""
    return {row["id"]: row for row in select_rows(tx, query, id=run_id)}


def _sum_up(groups: Sequence[int], rewards: Mapping[int, Row]) -> dict[str, Any]:
    done = [rewards[group] for group in groups if group in rewards]
    choosing = [row for row in done if row["role"] == "choose"]
    return {
        "groups": len(groups),
        "episodes_done": sum(row["episodes"] for row in done),
        "mean_reward": _mean(done),
        "choose_reward": _mean(choosing),
    }


def _mean(groups: Sequence[Row]) -> float | None:
    episodes = sum(row["episodes"] for row in groups)
    rewards = [row["reward"] for row in groups]
    return sum(rewards) / episodes if episodes and None not in rewards else None  # the sum of infinities is none


def _parse_cursor(cursor: str, run_id: int) -> int:
    if not cursor:
        return 0
    match decode_cursor(cursor, KIND):
        case [of, last] if of == run_id and is_id(last):
            return int(last)
    raise cursor_error(cursor)
