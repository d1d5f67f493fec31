"""Stop strings: the token that completes one is found where a search of the whole text would find it, in any spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agentrl.workflow.chat.stop_strings import Spelling, Stops
from agentrl.workflow.errors import ModelError
from tests.support.small_models import chat, tokenizer

WORDS = ("What is ", "</answer>", "answer", "\n\n", "é", "漢字", "🙂", "🙂🙃", "<tool_call>", "<|im_end|>", "12", " ")
TEXTS = st.lists(st.sampled_from(WORDS) | st.text("ab\n é漢🙂<>/", max_size=4), max_size=8).map("".join)
STRINGS = st.lists(st.sampled_from(WORDS) | st.text("ab\n é漢🙂<>/", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)
CHAT = chat()
SPELLING = Spelling(tokenizer())
LETTERS = {SPELLING[token]: token for token in range(len(tokenizer()))}
ANY_IDS = st.lists(st.integers(0, len(tokenizer()) - 1), max_size=12)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def first_by_text(ids: list[int], strings: tuple[str, ...]) -> int | None:
    """After how many ids the decoded text has one of the strings."""
    return next((n for n in range(1, len(ids) + 1) if any(s in CHAT.decode(ids[:n]) for s in strings)), None)


def first(stops: Stops, ids: list[int]) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if stops.is_completed(ids[:n])), None)


@given(TEXTS, STRINGS)
def test_stop_string_is_found_at_completing_token(text: str, strings: tuple[str, ...]) -> None:
    ids = ids_of(text)
    assert first(CHAT.stops(strings), ids) == first_by_text(ids, strings)


@given(TEXTS, ANY_IDS, TEXTS, STRINGS)
def test_stop_string_is_found_among_tokens_without_text(
    before: str, between: list[int], after: str, strings: tuple[str, ...]
) -> None:
    ids = [*ids_of(before), *between, *ids_of(after)]
    assert first(CHAT.stops(strings), ids) == first_by_text(ids, strings)


@given(st.lists(st.sampled_from(list("éa漢🙂".encode())), max_size=12), STRINGS)
def test_stop_string_is_found_in_characters_split_over_tokens(spelled: list[int], strings: tuple[str, ...]) -> None:
    ids = [LETTERS[bytes([byte])] for byte in spelled]
    assert first(CHAT.stops(strings), ids) == first_by_text(ids, strings)


@given(TEXTS, ANY_IDS, STRINGS)
def test_stop_string_check_reads_nothing_after_its_ids(text: str, after: list[int], strings: tuple[str, ...]) -> None:
    ids, stops = ids_of(text), CHAT.stops(strings)
    for n in range(1, len(ids) + 1):
        assert stops.is_completed([*ids, *after], n) == stops.is_completed(ids[:n])


@given(ANY_IDS)
def test_stop_string_spelling_equals_decoded_text(ids: list[int]) -> None:
    assert b"".join(SPELLING[token] for token in ids).decode(errors="replace") == CHAT.decode(ids)


def test_stop_string_ignores_id_beyond_tokenizer() -> None:
    beyond = len(tokenizer()) + 7
    stops = CHAT.stops(("12",))
    assert not stops.is_completed([beyond])
    assert stops.is_completed([*ids_of("1"), beyond, *ids_of("2")])


def test_stop_string_is_completed_once_and_watch_is_shared() -> None:
    stops = CHAT.stops(("is 1",))
    ids = ids_of("What is 12")
    assert [stops.is_completed(ids[:n]) for n in range(1, len(ids) + 1)].count(True) == 1
    assert CHAT.stops(("is 1",)) is stops
    assert CHAT.stops(("is 1", "x")) is not stops


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer with the pieces and the decoder of Llama 2 and Gemma: spaces as U+2581, other characters as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"ab<>/", "▁a", "ab"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True
    )
    made = Tokenizer(model)
    made.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@given(st.text("ab é漢🙂<>/\n"), st.lists(st.text("ab é漢🙂<>/\n", min_size=1, max_size=3), min_size=1, max_size=3))
def test_stop_string_spelling_covers_sentencepiece(text: str, strings: list[str]) -> None:
    pieces = sentencepiece()
    ids = pieces.encode("a" + text.replace(" ", "▁"), add_special_tokens=False)
    spelling = Spelling(pieces)
    assert b"".join(spelling[token] for token in ids).decode() == "a" + text
    ends = [n for n in range(1, len(ids) + 1) if any(s in pieces.decode(ids[:n]) for s in strings)]
    assert first(Stops(spelling, strings), ids) == (min(ends) if ends else None)


def test_stop_strings_refuse_tokenizer_without_bytes() -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()  # type: ignore[assignment]
    for odd in (made, Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))):
        with pytest.raises(ModelError, match="does not give the bytes"):
            Spelling(PreTrainedTokenizerFast(tokenizer_object=odd))


def test_chat_tells_end_token_from_stop_string() -> None:
    assert CHAT.has_end_token(ids_of("42<|im_end|>"))
    assert not CHAT.has_end_token(ids_of("42</answer>"))
    assert not CHAT.has_end_token(())
