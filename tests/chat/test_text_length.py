"""A text that is much too long is not read to its end; one that may fit is not refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.chat.rendering import PIECE, TooLong, check_length
from agentrl.workflow.trajectory import Message
from tests.support.small_models import chat

CHAT = chat()


def encode(text: str) -> list[int]:
    return list(CHAT.tokenizer.encode(text, add_special_tokens=False))


def test_check_length_stops_reading_once_too_long() -> None:
    read: list[int] = []

    def reading(text: str) -> list[int]:
        read.append(len(text))
        return encode(text)

    with pytest.raises(TooLong, match="The messages have more than 1000 tokens"):
        check_length(reading, "7 " * 10 * PIECE, 1000)
    assert read == [PIECE]


@given(st.text(max_size=200), st.integers(0, 2000))
def test_check_length_never_refuses_text_that_fits(text: str, times: int) -> None:
    whole = (text * times)[: 4 * PIECE]
    check_length(encode, whole, len(encode(whole)))


def test_opening_counts_ids_before_reading_them() -> None:
    assert CHAT.opening([Message("prompt_ids", "[1, 2, 3]")], max_tokens=3) == (1, 2, 3)
    with pytest.raises(TooLong, match="The messages have more than 3 tokens"):
        CHAT.opening([Message("prompt_ids", f"[1, 2, 3, {10**9}]")], max_tokens=3)


def test_opening_refuses_long_prompt_before_tokenizing() -> None:
    long = (Message("user", "7 " * PIECE),)
    with pytest.raises(TooLong):
        CHAT.opening(long, max_tokens=100)
    with pytest.raises(TooLong):
        CHAT.continuation(long, max_tokens=100)
    assert len(CHAT.opening(long)) > 100
