"""One full text of an episode, by the path that a cut text is listed with."""

import json
from typing import Any

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.driver_reader import select_rows
from agentrl.workflow.store.reads.episode_shape import EpisodeShape, load_shape

MAX_PATH = 200
"""The most characters of a path."""
_OF_STEPS = ("thought", "content", "text", "new_row")
_OF_AGENTS = ("error", "output", "answer")
_OF_EPISODES = ("final_answer", "error")
_OF_MESSAGES = ("content", "thought", "tool_calls")


def load_text(tx: Any, episode: int, path: str) -> str:
    """Return the full text; other values as JSON.

    Raises:
        NotFoundError: there is no such episode, or it has no such text.
    """
    shape = load_shape(tx, episode)
    found = _find(tx, shape, path.split("/")) if len(path) <= MAX_PATH else None
    if found is None:
        raise NotFoundError(f"Episode {episode} has no text {path[:60]!r}.", "Use the paths that its answer lists under `of`.")
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _find(tx: Any, shape: EpisodeShape, path: list[str]) -> Any:
    match path:
        case ["episode", name] if name in _OF_EPISODES:
            return _column(tx, f"SELECT {name} AS found FROM episodes WHERE id = :id", id=shape.id)
        case ["task", "reference"]:
            return _column(tx, "SELECT reference AS found FROM tasks WHERE id = :id", id=shape.task_id)
        case ["task", "messages", place, name] if name in _OF_MESSAGES:
            found = select_rows(tx, "SELECT messages FROM tasks WHERE id = :id", id=shape.task_id)
            return _of_message(found[0]["messages"], place, name)
        case ["agent", name] if name in _OF_AGENTS:
            query = f"""
                SELECT {name} AS found FROM agent_attempts WHERE episode_id = :id AND attempt = :attempt
                ORDER BY id DESC LIMIT 1"""
            return _column(tx, query, id=shape.id, attempt=shape.attempt)
        case ["steps", step, name] if name in _OF_STEPS:
            return _column(tx, f"SELECT {name} AS found FROM steps WHERE id = :id", id=_step_id(shape, step))
        case ["steps", step, "messages", place, name] if name in _OF_MESSAGES:
            found = select_rows(tx, "SELECT prompt FROM steps WHERE id = :id", id=_step_id(shape, step))
            return _of_message(found[0]["prompt"], place, name) if found else None
        case ["calls", call, name] if name in ("arguments", "result"):
            return _of_call(tx, shape, _number(call), name)
        case ["annotations", said, "data"]:
            query = "SELECT data FROM annotations WHERE id = :said AND episode_id = :id"
            found = select_rows(tx, query, said=_number(said), id=shape.id)
            return found[0]["data"] if found else None
    return None


def _column(tx: Any, query: str, **parameters: Any) -> str | None:
    found = select_rows(tx, query, **parameters)
    return found[0]["found"] if found else None


def _number(word: str) -> int:
    """The number, or -1, which no row and no place has."""
    return int(word) if len(word) <= 18 and word.isascii() and word.isdigit() else -1


def _step_id(shape: EpisodeShape, step: str) -> int:
    return next(iter(shape.step_ids([_number(step)])), -1)


def _of_message(messages: Any, place: str, name: str) -> Any:
    number = _number(place)
    if not isinstance(messages, list) or not 0 <= number < len(messages) or not isinstance(messages[number], dict):
        return None
    found = messages[number].get(name)
    return found if found is None or name == "tool_calls" else str(found)


def _of_call(tx: Any, shape: EpisodeShape, call: int, name: str) -> Any:
    """Of a call of the episode's own, or of a step that it has from its parent."""
    query = f"SELECT episode_id, step_id, {name} FROM tool_calls WHERE id = :id"
    found = select_rows(tx, query, id=call)
    if not found or (found[0]["episode_id"] != shape.id and found[0]["step_id"] not in {row["id"] for row in shape.rows}):
        return None
    return found[0][name]
