"""Texts of an answer within one measure: long ones are cut, and where many are long, the later ones are cut shorter."""

from typing import Any

from agentrl.workers.page.shown.cutting import SHOWN_CHARS, cut_value

ANSWER_CHARS = 2_000_000
"""About the most characters of all texts of an answer."""
LEAST_CHARS = 200
"""As many are shown of any text."""


class ShownTexts:
    """A writer of texts into an answer; a cut text has its length in `cut` and its path in `of`, by its name."""

    def __init__(self, most: int = SHOWN_CHARS, together: int = ANSWER_CHARS) -> None:
        """Take the most characters of one text, and of all."""
        self._most, self._left = most, together

    def put(self, target: dict[str, Any], name: str, text: str | None, chars: int | None = None, path: str = "") -> None:
        """Put a text, or as much of it as fits.

        Args:
            text: itself or its beginning; `chars`, how many characters it has in all.
            path: where `/api/episodes/{id}/text` gives the rest.
        """
        if text is None:
            target[name] = None
            return
        whole = max(len(text), chars or 0)
        shown = text[: self._room()]
        self._left -= len(shown)
        target[name] = shown
        if len(shown) < whole:
            self._mark(target, name, whole, path)

    def put_value(self, target: dict[str, Any], name: str, value: Any, path: str = "") -> None:
        """Put a value of JSON's kinds as it is; a large one as the beginning of its text."""
        shown, chars = cut_value(value, self._room())
        if isinstance(shown, str):
            self._left -= len(shown)
        else:
            self._left -= len(str(shown))
        target[name] = shown
        if chars is not None:
            self._mark(target, name, chars, path)

    def _room(self) -> int:
        return max(LEAST_CHARS, min(self._most, self._left))

    def _mark(self, target: dict[str, Any], name: str, chars: int, path: str) -> None:
        target.setdefault("cut", {})[name] = chars
        if path:
            target.setdefault("of", {})[name] = path
