"""Lists of the versions of the texts (such as prompts) that runs use, and of the requests of searches to critics."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import (
    BY_NUMBER,
    Page,
    Paging,
    choose_conditions,
    cursor_error,
    decode_cursor,
    encode_cursor,
    is_id,
    select_page,
)
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.tables.views import CriticCallRow, ResourceRow


@dataclass(frozen=True, slots=True)
class ResourceFilter:
    """A filter of versions of texts: by run (name or number), name of the text, and whether a search chose the version."""

    run: str | None = None
    name: str | None = None
    chosen: bool | None = None


_CONDITIONS = {"name": "name = :name", "chosen": "chosen = :chosen"}


@sql_read_transaction
def list_resources(tx: Any, chosen: ResourceFilter, paging: Paging | None = None) -> Page[ResourceRow]:
    """Return versions of texts, in the order in which they were first tried."""
    conditions, values = choose_conditions(chosen, _CONDITIONS)
    if chosen.run is not None:
        conditions, values["run"] = ["run = :run", *conditions], run_id_and_name(tx, chosen.run)["name"]
    return select_page(tx, ResourceRow, conditions, values, paging or Paging(), BY_NUMBER, "id")


@sql_read_transaction
def load_current_texts(tx: Any, run: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a run by name: those that its search chose, and without a search those of its config."""
    texts = dict(config.get("resources") or {})  # runs older than this option lack it
    if not texts:
        return texts
    query = "SELECT name, text FROM resources WHERE run_id = :id AND chosen"
    chosen = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    return texts | {row["name"]: row["text"] for row in chosen}


@dataclass(frozen=True, slots=True)
class CriticCallFilter:
    """A filter of requests to critics by run (its name or number)."""

    run: str | None = None


@sql_read_transaction
def list_critic_calls(tx: Any, chosen: CriticCallFilter, paging: Paging | None = None) -> Page[CriticCallRow]:
    """Return the requests that searches sent to their critics, oldest first."""
    conditions, values = choose_conditions(chosen, {})
    if chosen.run is not None:
        conditions, values["run"] = ["run = :run", *conditions], run_id_and_name(tx, chosen.run)["name"]
    return select_page(tx, CriticCallRow, conditions, values, paging or Paging(), BY_NUMBER, "id")


KIND = "prompts"
MAX_PROMPTS = 50
"""The maximum number of versions on a page."""
MAX_GROUPS = 2500
"""The maximum number of groups whose episodes are counted for a page."""


@dataclass(frozen=True, slots=True)
class PromptsPage:
    """A page of versions of texts.

    `next` is the cursor of the following page. `left_out` is the number of versions on this page whose episodes were not read
    because the versions have too many groups. The rewards of these versions are None.
    """

    rows: Sequence[Mapping[str, Any]]
    next: str
    left_out: int


@sql_read_transaction
def list_prompts(tx: Any, run: str, size: int, cursor: str = "") -> PromptsPage:
    """Return at most MAX_PROMPTS versions of the run's texts, in the order in which they were first tried. Raise NotFoundError
    if there is no such run. Raise ConfigError if the cursor does not belong to this list.
    """
    size = min(size, MAX_PROMPTS)
    run_row = run_id_and_name(tx, run)
    query = """
        SELECT id, name, version, parent_version, note, chosen, text, created_at FROM resources
        WHERE run_id = :id AND id > :last ORDER BY id LIMIT :limit"""
    rows = select_rows(tx, query, id=run_row["id"], last=_parse_cursor(cursor, run_row["id"]), limit=size + 1)
    page = rows[:size]
    sums = _load_sums(tx, run_row["id"], [row["id"] for row in page])
    prompts = [{**row, "run": run_row["name"], **sums.get(row["id"], _UNREAD)} for row in page]
    following = encode_cursor(KIND, run_row["id"], page[-1]["id"]) if len(rows) > size else ""
    return PromptsPage(prompts, following, sum(row["episodes_done"] is None for row in prompts))


_UNREAD: Mapping[str, Any] = {"groups": None, "episodes_done": None, "mean_reward": None, "choose_reward": None}


def _load_sums(tx: Any, run_id: int, versions: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the numbers of groups and done episodes and the mean rewards of each version, by version id."""
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
    """Return the role of the task, the number of done episodes and the sum of their rewards for each group, by group id."""
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
