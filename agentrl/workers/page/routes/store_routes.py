"""The route for the store: where it is, and whether actions are allowed."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from agentrl import __version__
from agentrl.workers.page.answers import answer
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.routes import Store
from agentrl.workflow.store.connect import database_url
from agentrl.workflow.store.reads import run_rows

router = APIRouter(prefix="/api", tags=["store"])


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The store of the page.

    Args:
        place: its file, or its URL without a password.
        backend: "sqlite" or "postgresql".
        version: this agentrl's version.
        newest_run: the name of the run that was submitted last; null if there is none.
        actions: the page may do more than read.
    """

    place: str
    backend: str
    version: str
    newest_run: str | None
    actions: bool


@router.get("/store", response_model=StoreAnswer)
def describe_store(store: Store, request: Request) -> Response:
    """Return a description of the page's store."""
    newest = run_rows.find_newest_run(store)
    return answer({**describe_place(store), "version": __version__, "newest_run": newest, "actions": request.app.state.actions})


def describe_place(store: ReadOnlyStore) -> dict[str, str]:
    """Return the location of the store, without a password."""
    url = database_url(store.settings.database)
    is_file = url.get_backend_name() == "sqlite"
    place = str(url.database) if is_file else url.set(drivername="postgresql").render_as_string(hide_password=True)
    return {"place": place, "backend": "sqlite" if is_file else "postgresql"}
