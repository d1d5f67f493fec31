"""What the page's service answers over a database, asked in process."""

import asyncio
import json
from typing import Any

import httpx2

from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.service import application
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database


class PageOver:
    """The service over one database, as its page asks it."""

    def __init__(self, database: Database | Settings) -> None:
        if isinstance(database, Database):
            database = Settings(database_url=database.url.render_as_string(hide_password=False))
        self._app = application(ReadOnlyStore(database))

    def ask(self, path: str, **asked: Any) -> tuple[int, Any]:
        """The status and the document that a path answers; NaN and infinity in it are refused."""
        answered = asyncio.run(self._get(path, asked))
        return answered.status_code, json.loads(answered.content.decode(), parse_constant=_refuse)

    def read(self, path: str, **asked: Any) -> Any:
        """The document that a path answers, which must be there."""
        status, document = self.ask(path, **asked)
        assert status == 200, (path, status, document)
        return document

    async def _get(self, path: str, asked: dict[str, Any]) -> httpx2.Response:
        transport = httpx2.ASGITransport(self._app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:7788") as client:
            return await client.get(path, params=asked or None)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
