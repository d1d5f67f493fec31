"""The page's service as an ASGI application: its routes and its static files."""

import traceback
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from agentrl import __version__
from agentrl.workers.page.answers import answer, refuse
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workflow.errors import AgentRLError

STATIC = Path(__file__).parent / "static"
SMALLEST_ZIPPED = 1000
"""The smallest response that is compressed, in bytes."""


def application(store: ReadOnlyStore, actions: bool = False) -> FastAPI:
    """Return the application for a store."""
    from agentrl.workers.page import action_routes, live_routes
    from agentrl.workers.page.routes import (
        annotation_routes,
        episode_routes,
        eval_routes,
        group_routes,
        run_routes,
        sql_routes,
        store_routes,
    )

    reads = (store_routes, run_routes, group_routes, episode_routes, eval_routes, annotation_routes)
    modules = (*reads, sql_routes, live_routes, action_routes)
    app = FastAPI(
        title="agentrl ui",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        # As they are: `include_router` would analyse every endpoint's parameters a second time.
        routes=[route for module in modules for route in module.router.routes],
    )
    app.state.store, app.state.actions, app.state.is_ending = store, actions, lambda: False
    app.state.live = live_routes.Live(store, lambda: bool(app.state.is_ending()))
    app.add_exception_handler(AgentRLError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(RequestValidationError, _refuse_values)
    app.add_exception_handler(Exception, _answer_mistake)
    app.add_middleware(GZipMiddleware, minimum_size=SMALLEST_ZIPPED, compresslevel=5)
    app.add_api_route("/", lambda: FileResponse(STATIC / "index.html"), methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, AgentRLError)
    return refuse(error)


async def _refuse_path(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer({"error": f"{error.detail}.", "hint": "See /api/openapi.json"}, error.status_code)


async def _answer_mistake(_: Request, error: Exception) -> Response:
    """Respond with status 500 to an unexpected exception. The process of `agentrl ui` prints the traceback."""
    traceback.print_exception(error)
    message = f"The page cannot show this: {type(error).__name__}."
    return answer({"error": message, "hint": "The output of `agentrl ui` shows where it failed; please report it."}, 500)


async def _refuse_values(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part)[:50] for part in first["loc"][1:])
    return answer({"error": f"{where or 'The body'}: {first['msg']}.", "hint": "See /api/openapi.json"}, 422)
