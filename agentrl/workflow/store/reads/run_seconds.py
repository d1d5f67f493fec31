"""How long the parts of a run took."""

from typing import Any

from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.run_rows import run_id_and_name

_QUERIES = {
    "run": """
        SELECT sum(seconds) AS whole, sum(rollout_seconds) AS rollout, sum(update_seconds) AS "update" FROM v_iterations""",
    "episodes": """
        SELECT sum(seconds) AS whole, sum(generate_seconds) AS sampling, sum(tool_seconds) AS tools FROM v_episodes""",
    "calls": """
        SELECT sum(CASE WHEN kind <> 'grade' THEN queue_seconds END) AS "waiting for a tools worker",
               sum(CASE WHEN kind = 'grade' THEN seconds END) AS judging FROM v_tool_calls""",
}


@sql_read_transaction
def load_run_seconds(tx: Any, run: str, episodes: bool = True) -> list[Row]:
    """Return how long the parts of a run took, as rows with `of`, `part` and `seconds`. Raise NotFoundError if there is no such
    run.

    Rows with `of` = "run" are the parts of the run's iterations. Rows with `of` = "episodes" are the parts of its episodes,
    added up. Episodes run at the same time, so the sum of their seconds may exceed that of the run. The part "waiting" is the
    time that is in no other part.

    Args:
        episodes: False to leave out the parts of episodes, whose sums take a while in a large run.
    """
    name = run_id_and_name(tx, run)["name"]
    kinds = [*_QUERIES] if episodes else ["run"]
    sums = {of: dict(select_rows(tx, f"{_QUERIES[of]} WHERE run = :run", run=name)[0]) for of in kinds}
    if episodes:
        sums["episodes"] |= sums.pop("calls")
    rows: list[Row] = []
    for of, parts in sums.items():
        whole = parts.pop("whole") or 0.0
        parts["waiting"] = max(0.0, whole - sum(value or 0.0 for value in parts.values()))
        rows += [{"of": of, "part": part, "seconds": float(value)} for part, value in parts.items() if value]
    return rows
