"""Every route of the page over a store whose numbers are not finite: it answers, with null."""

import pytest

from agentrl.workflow.store.connect import Database
from tests.support.hostile_rows import MIXED, fill_with
from tests.support.page_answers import PageOver

ROUTES = (
    "runs", "runs/1", "runs/2", "runs/1/curves", "runs/1/iterations/1", "runs/1/episodes", "groups/1", "groups/2", "episodes/1",
    "episodes/2", "episodes/3", "episodes/1/tokens", "runs/1/tasks/1", "runs/1/tasks", "runs/1/lanes", "runs/1/events", "evals",
    "runs/1/prompts", "runs/1/annotations", "runs/1/series?view=v_rewards&column=value", "runs/1/ledger", "compare?a=3&b=4",
)  # fmt: skip


@pytest.mark.parametrize("number", ["9e999", "-9e999", MIXED])
def test_infinity_in_every_number_is_answered_as_null(sqlite: Database, number: str) -> None:
    with sqlite.engine.begin() as tx:
        fill_with(tx, number)
    page = PageOver(sqlite)
    for route in ROUTES:
        page.read(f"/api/{route}")
