"""Stop strings: texts that end a turn as soon as a sampled token completes one.

A stop string may begin and end inside a token, and a character may be split over several tokens. So bytes are compared, not
texts. Every id stands for some bytes (`Spelling`). The result depends only on the turn's ids, however they were sampled.

The tokens of a stop string stay in the turn. The client that sent the string gets only the text before it (`cut_at_stop`,
`StopCut`).
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from agentrl.workflow.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Spelling:
    """The bytes of each id in byte-level BPE (Qwen, Llama 3) or SentencePiece (Gemma, Mistral).

    Args:
        tokenizer: the tokenizer; its special tokens have bytes too.

    Raises:
        ModelError: the tokenizer decodes ids in another way.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        kinds = _decoders(tokenizer)
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise ModelError(
                f"The tokenizer of {tokenizer.name_or_path!r} does not give the bytes of a token, which stop strings need.",
                "Leave rollout.stop out.",
            )
        self._name = tokenizer.convert_ids_to_tokens
        self._spelled = _byte_level if "ByteLevel" in kinds else _piece
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Return the bytes of an id; empty for an id without a token."""
        if token not in self._known:
            name: Any = self._name(token)
            self._known[token] = self._spelled(name) if name else b""
        return self._known[token]


class Stops:
    """Finds stop `strings` in sampled tokens, for one tokenizer. `spelling` has the bytes of each token id."""

    def __init__(self, spelling: Spelling, strings: Sequence[str]) -> None:
        self._spelling = spelling
        self._strings = [string.encode() for string in strings]
        self._reach = max(map(len, self._strings))
        self._may: dict[int, bool] = {}

    def is_completed(self, ids: "Sequence[int] | NDArray[np.int64]", end: int | None = None) -> bool:
        """Return True if the last token of a turn completes one of the strings. The turn is the first `end` ids of `ids`; if
        `end` is None, it is all of them. Only the end of the turn is read.
        """
        end = len(ids) if end is None else end
        last = int(ids[end - 1])
        if last not in self._may:  # which settles it for most tokens
            self._may[last] = self._may_complete(self._spelling[last])
        return self._may[last] and self._completes(ids, end)

    def _may_complete(self, token: bytes) -> bool:
        """Return True if one of the strings can end inside the bytes of this token."""
        parts = [token[:size] for size in range(1, len(token) + 1)]
        return any(string.endswith(part) or part.endswith(string) for part in parts for string in self._strings)

    def _completes(self, ids: "Sequence[int] | NDArray[np.int64]", end: int) -> bool:
        tail = last = self._spelling[int(ids[end - 1])]
        at = end - 2
        while at >= 0 and len(tail) < self._reach + len(last):
            tail = self._spelling[int(ids[at])] + tail
            at -= 1
        new = len(tail) - len(last)
        return any(tail.find(string, max(0, new - len(string) + 1)) >= 0 for string in self._strings)


def cut_at_stop(text: str, strings: Sequence[str]) -> str:
    """Return the text before the first stop string that is completed; the complete text if it contains no stop string."""
    ends = [(start + len(string), start) for string in strings if (start := text.find(string)) >= 0]
    return text[: min(ends)[1]] if ends else text


class StopCut:
    """A filter that cuts a streamed text where `cut_at_stop` would cut the complete text.

    If the text so far ends with a possible beginning of a stop string, the filter holds that end back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._waiting = ""
        self._is_over = False

    def take(self, piece: str) -> str:
        """Add a piece of text. Return the text that certainly comes before any stop string."""
        if self._is_over:
            return ""
        self._waiting += piece
        before = cut_at_stop(self._waiting, self._strings)
        self._is_over = len(before) < len(self._waiting)
        if self._is_over:
            return before
        held = max((overlap(before, string) for string in self._strings), default=0)
        certain, self._waiting = before[: len(before) - held], before[len(before) - held :]
        return certain

    def rest(self) -> str:
        """Return the text that was held back; call it after the last piece."""
        return "" if self._is_over else self._waiting


def overlap(text: str, string: str) -> int:
    """Return the number of characters at the end of the text that may be the beginning of the string."""
    return next((size for size in range(min(len(string) - 1, len(text)), 0, -1) if string.startswith(text[-size:])), 0)


def _decoders(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the kinds of decoders in a tokenizer of the `tokenizers` library; empty for other tokenizers."""
    from transformers import PreTrainedTokenizerFast  # imported here: the command line imports this file, through the chat

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.backend_tokenizer.decoder is None:
        return set()
    decoder: Any = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    return {decoder["type"], *(inner["type"] for inner in decoder.get("decoders", ()))}


def _byte_level(name: str) -> bytes:
    letters = _letters()
    spelled = [letters.get(letter) for letter in name]
    return name.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)


@cache
def _letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level BPE (GPT-2)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(unseen)}


def _piece(name: str) -> bytes:
    """Return the bytes of a SentencePiece token: `<0xC3>` is one byte, and U+2581 stands for a space."""
    byte = _BYTE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()
