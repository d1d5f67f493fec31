"""Decodes tokens with the tokenizer of the run's base model, if its files are on this machine. Nothing is downloaded."""

import codecs
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from agentrl.workflow.settings import Settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
MAX_FILE = 1 << 28
"""The largest tokenizer file that is read, in bytes."""
MAX_TOKENIZERS = 4
"""The most tokenizers that are kept in memory."""
_loading = Lock()


@dataclass(frozen=True)
class TokenTexts:
    """A tokenizer that returns the text of each single token."""

    tokenizer: "Tokenizer"
    letters: dict[str, int] | None
    """For a byte-level tokenizer, the byte that each letter stands for. None for other tokenizers: their vocabulary contains
    texts, with marks for spaces and bytes.
    """
    added: dict[int, str]
    _known: dict[int, bytes] = field(default_factory=dict)

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. If a character consists of several tokens, it belongs to the first of them."""
        return join_pieces([self._bytes(token) for token in ids])

    def whole(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens together."""
        return b"".join(map(self._bytes, ids)).decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        cached = self._known.get(token)
        if cached is None:
            cached = self._known[token] = self._make_bytes(token)
        return cached

    def _make_bytes(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode("utf-8", "replace")
        word = self.tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if word is None:
            return b""  # no token of this model
        if self.letters is not None:
            with suppress(KeyError):
                return bytes(self.letters[letter] for letter in word)
        if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            with suppress(ValueError):
                return bytes([int(word[3:5], 16)])
        return word.replace("▁", " ").encode("utf-8", "replace")


def join_pieces(pieces: Sequence[bytes]) -> list[str]:
    """Decode pieces of UTF-8 and return one text per piece. A character that is split belongs to its first piece. Invalid bytes
    become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    held: int | None = None  # whose letter is not whole yet
    for place, piece in enumerate(pieces):
        decoded = decoder.decode(piece)
        if held is not None and decoded:
            texts[held] += decoded[0]
            decoded, held = decoded[1:], None
        texts.append(decoded)
        if held is None and decoder.getstate()[0]:
            held = place
    if held is not None:
        texts[held] += decoder.decode(b"", True)
    return texts


@dataclass(frozen=True, slots=True)
class FoundTexts:
    """The texts of a base model's tokens. If `texts` is None, `why_none` says why. `sure` is False if the tokenizer may be that
    of another model.
    """

    texts: TokenTexts | None
    why_none: str = ""
    sure: bool = True

    def checked(self, ids: Sequence[int], text: str) -> "FoundTexts":
        """Return this object if its tokenizer is sure or decodes `ids` to the recorded `text`; otherwise return an object
        without texts.
        """
        if self.texts is None or self.sure or self.texts.whole(ids).replace("\0", "\ufffd").startswith(text[: len(ids)]):
            return self
        return FoundTexts(None, "The model with this name on this machine has another tokenizer.")


def find_texts(where: Settings, base: str) -> FoundTexts:
    """Return the texts of the tokens of a base model, or the reason why they are not available."""
    file, sure = _find_file(where, base)
    if file is None:
        return FoundTexts(None, f"The tokenizer of {base[:200]!r} is not on this machine.")
    try:
        size, changed = file.stat().st_size, file.stat().st_mtime_ns
        if size > MAX_FILE:
            return FoundTexts(None, f"The file {str(file)!r} is larger than {MAX_FILE} bytes.")
        with _loading:
            return FoundTexts(_load(str(file), size, changed), sure=sure)
    except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself
        return FoundTexts(None, f"The tokenizer {str(file)[:200]!r} cannot be read: {' '.join(str(error).split())[:200]}.")


def _find_file(where: Settings, base: str) -> tuple[Path | None, bool]:
    """Return the tokenizer's file, and whether it is surely that of the base model."""
    if not base or "\0" in base:
        return None, False
    with suppress(OSError, ValueError):
        if (file := Path(base) / FILE).is_file():
            return file, True
        if not Path(base).is_absolute() and (cached := _find_cached(base)):
            return cached, True
        if (file := where.models_dir / Path(base).name / FILE).is_file():
            return file, False
    return None, False


def _find_cached(base: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        cached = try_to_load_from_cache(base, FILE)
        return Path(cached) if isinstance(cached, str) else None
    return None


@lru_cache(MAX_TOKENIZERS)
def _load(file: str, size: int, changed: int) -> TokenTexts:
    from tokenizers import Tokenizer

    text = Path(file).read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    return TokenTexts(tokenizer, _byte_letters() if _is_byte_level(json.loads(text).get("decoder")) else None, added)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders")
    return decoder.get("type") == "ByteLevel" or (isinstance(inner, list) and any(map(_is_byte_level, inner)))


def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of GPT-2's byte-level alphabet stands for."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in seen)
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(others)}
