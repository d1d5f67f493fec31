"""A check that refuses texts much longer than the model's window, without tokenizing them completely."""

from collections.abc import Callable, Sequence

from agentrl.workflow.errors import ModelError

CHEAP = 4
"""The number of characters, as a multiple of `max_tokens`, up to which a text is not checked."""
SURE = 2
"""The number of tokens, as a multiple of `max_tokens`, above which a text is certainly too long.

The pieces are tokenized separately, so the counted number may be somewhat too high.
"""
PIECE = 65_536
"""The number of characters that are tokenized in one call."""


class TooLong(ModelError):
    """A text certainly has more tokens than fit into the window."""


def check_length(encode: Callable[[str], Sequence[int]], text: str, max_tokens: int) -> None:
    """Refuse a text with many more than `max_tokens` tokens. A short text is accepted without tokenizing it.

    A longer text is tokenized in pieces, until it is certainly too long or its end is reached. Raise TooLong if the text has
    more than `max_tokens` tokens.
    """
    if len(text) <= CHEAP * max_tokens:
        return
    count = 0
    for start in range(0, len(text), PIECE):
        count += len(encode(text[start : start + PIECE]))
        if count > SURE * max_tokens:
            raise TooLong(f"The messages have more than {max_tokens} tokens.")
