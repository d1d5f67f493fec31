"""search: finds the passages of a text collection that match a query best, by BM25 (SQLite's FTS5).

The collection is a folder of text files (.txt, .md, .markdown, .rst, with all sub-folders), or a .jsonl file (one object per
line with `text` or `contents`, and optionally `title`). It may also be the http:// URL of a server that answers a POST of
`{"query": ..., "k": ...}` with `{"results": [{"title": ..., "text": ...}, ...]}`.

If a run selects the tool by its plain name, it searches the collection in AGENTRL_SEARCH; `search_in(...)` creates a tool for
an env's own collection. The index is built once per process, at the first call, in a temporary file that SQLite removes itself.
"""

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
from pydantic import Field

from agentrl.workflow.errors import ConfigError, ServiceError, ToolFailure
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.runtime.time_limit import within
from agentrl.workflow.settings import is_url, settings
from agentrl.workflow.tools import Tool

SUFFIXES = {".txt", ".md", ".markdown", ".rst"}
PASSAGE = 1000
"""The maximum length of a passage, in characters. Paragraphs are joined up to this length, and longer ones are cut."""

MAX_WORDS = 64
MAX_CHARACTERS = 8000
ANSWER_SECONDS = 10.0
MAX_BYTES = 4_000_000
HINT = "Set AGENTRL_SEARCH to a folder of texts, a .jsonl file or an http:// URL."


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a text, with the text's title."""

    title: str
    text: str


Search = Callable[[str, int], Sequence[Passage]]
"""A function (query, k) -> the k best passages, best first."""


def search_in(collection: str | Path | Callable[[], Iterable[Passage]]) -> Tool:
    """Create a search tool for a folder, a .jsonl file, a URL, or the passages that a function returns."""
    return _tool(lambda: collection)


def _tool(locate: Callable[[], str | Path | Callable[[], Iterable[Passage]]], variables: tuple[str, ...] = ()) -> Tool:
    opened = Once(lambda: open_search(locate()))

    def search(query: str, k: Annotated[int, Field(ge=1, le=20)] = 3) -> str:
        """Searches a collection of texts and returns the k passages that fit the query best."""
        passages = opened()(query, k)
        if not passages:
            return "nothing was found; try other words"
        return "\n\n".join(f"[{rank}] {passage.title}\n{passage.text}" for rank, passage in enumerate(passages, start=1))

    return Tool(
        search,
        timeout_seconds=15.0,
        max_characters=MAX_CHARACTERS,
        needs=lambda: check(locate()),
        opens=opened,
        variables=variables,
    )


def check(collection: str | Path | Callable[[], Iterable[Passage]]) -> None:
    """Check that the collection exists.

    Raises:
        ConfigError: the collection does not exist, or is a file of another kind.
    """
    if callable(collection) or is_url(str(collection)):
        return
    path = Path(collection).expanduser()
    if not collection or not (path.is_dir() or path.is_file()):
        what = f"nothing is at {str(path)!r}" if collection else "no collection is set"
        raise ConfigError(f"There is nothing to search: {what}.", HINT)
    if path.is_file() and path.suffix != ".jsonl":
        raise ConfigError(f"{str(path)!r} is neither a folder nor a .jsonl file.", HINT)


def open_search(collection: str | Path | Callable[[], Iterable[Passage]]) -> Search:
    """Open the collection for search. If the collection is not a URL, build an index.

    Raises:
        ConfigError: the collection does not exist or is empty.
    """
    check(collection)
    if callable(collection):
        return index(collection())
    if is_url(str(collection)):
        return lambda query, k: _search_server(str(collection), query, k)
    path = Path(collection).expanduser()
    return index(_line_passages(path) if path.is_file() else _folder_passages(path))


# an index of our own


def index(passages: Iterable[Passage]) -> Search:
    """Index the passages for search by BM25. A word in the title has twice the weight, and passages with equal scores keep
    their order.

    Raises:
        ConfigError: there is no passage.
    """
    # An empty name makes a temporary file of SQLite's own: large collections stay out of memory.
    table = sqlite3.connect("", check_same_thread=False, isolation_level=None)
    table.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61 remove_diacritics 2')")
    table.execute("BEGIN")
    added = table.executemany(
        "INSERT INTO passages VALUES (?, ?)", ((_utf8(p.title), _utf8(p.text)) for p in passages)
    ).rowcount
    table.execute("COMMIT")
    if added < 1:
        raise ConfigError("The collection to search has no texts.", HINT)
    turn = threading.Lock()

    def best(query: str, k: int) -> list[Passage]:
        terms = re.findall(r"\w+", _utf8(query))[:MAX_WORDS]
        if not terms:
            raise ToolFailure("the query contains no word to search for")
        match_query = " OR ".join(f'"{word}"' for word in terms)
        with turn:
            rows = table.execute(
                "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, 2.0, 1.0), rowid LIMIT ?",
                (match_query, k),
            ).fetchall()
        return [Passage(*row) for row in rows]

    return best


def _utf8(text: str) -> str:
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def _folder_passages(folder: Path) -> Iterator[Passage]:
    for file in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()):
        title = str(file.relative_to(folder))
        yield from (Passage(title, text) for text in split_text(file.read_text(encoding="utf-8", errors="replace")))


def _line_passages(file: Path) -> Iterator[Passage]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                title, text = _document(file, number, line)
                yield from (Passage(title, piece) for piece in split_text(text))


def _document(file: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        text = row["text"] if "text" in row else row["contents"]
        if not isinstance(text, str):
            raise TypeError("text must be text")
        return str(row.get("title", f"{file.stem}/{number}")), text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"Line {number} of {str(file)!r} is not an object with 'text': {problem}.", "Correct the file."
        ) from error


def split_text(text: str) -> Iterator[str]:
    """Yield the text in passages of at most PASSAGE characters, cut between paragraphs if possible."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip()
        if piece and len(piece) + len(paragraph) + 2 > PASSAGE:
            yield piece
            piece = ""
        while len(paragraph) > PASSAGE:
            cut = paragraph.rfind(" ", PASSAGE // 2, PASSAGE)
            cut = PASSAGE if cut < 0 else cut
            yield paragraph[:cut].rstrip()
            paragraph = paragraph[cut:].lstrip()
        piece = f"{piece}\n\n{paragraph}" if piece and paragraph else piece or paragraph
    if piece:
        yield piece


# a search server


def _search_server(url: str, query: str, k: int) -> list[Passage]:
    try:
        status, body = within(ANSWER_SECONDS, _post(url, {"query": _utf8(query), "k": k}))
    except TimeoutError as error:
        raise ServiceError(f"The search at {url} took longer than {ANSWER_SECONDS:g} s to answer.", HINT) from error
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        raise ServiceError(f"The search at {url} does not answer: {type(error).__name__}: {error}.", HINT) from error
    if status in (400, 422):
        raise ToolFailure(f"the search refuses the query: {body[:300].decode(errors='replace')}")
    if status != 200:
        raise ServiceError(f"The search at {url} answered {status}: {body[:300].decode(errors='replace')}.", HINT)
    try:
        return [_passage(row) for row in json.loads(body.decode())["results"][:k]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ServiceError(f"The search at {url} answered without a list of results: {str(error)[:300]}.", HINT) from error


async def _post(url: str, request: dict[str, Any]) -> tuple[int, bytes]:
    """Send a request to the search server, and return the status and body of the response.

    Raises:
        ServiceError: the body exceeds the size limit.
    """
    body = bytearray()
    headers = {"Accept-Encoding": "identity"}  # so that nothing decompresses to any size
    async with (
        httpx2.AsyncClient(timeout=None) as client,
        client.stream("POST", url, json=request, headers=headers) as response,
    ):
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_BYTES:
                raise ServiceError(f"The search at {url} answered with more than {MAX_BYTES} bytes.", HINT)
        return response.status_code, bytes(body)


def _passage(row: dict[str, Any]) -> Passage:
    title, text = row.get("title", ""), row["text"]
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("title and text must be text")
    return Passage(title, text)


search = _tool(lambda: settings().search, ("AGENTRL_SEARCH",))
