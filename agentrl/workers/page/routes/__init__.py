"""The routes of the page, and the parameter of all of them."""

from typing import Annotated

from fastapi import Depends, Request

from agentrl.workers.page.read_only import ReadOnlyStore


def _store(request: Request) -> ReadOnlyStore:
    store: ReadOnlyStore = request.app.state.store
    return store


Store = Annotated[ReadOnlyStore, Depends(_store)]
"""The store that the page shows."""
