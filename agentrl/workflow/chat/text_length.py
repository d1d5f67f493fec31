"""A check that refuses texts much longer than the model's window before all of them is tokenized, which takes seconds."""

from collections.abc import Callable, Sequence

from agentrl.workflow.errors import ModelError

CHEAP = 4
"""The number of characters per token that fits, up to which a text is not checked."""
SURE = 2
"""The factor above the number of tokens that fit, at which a text is certainly too long.

The pieces are tokenized separately, so their count may be somewhat too high.
"""
PIECE = 65_536
"""The number of characters that are tokenized at once."""


class TooLong(ModelError):
    """A text that certainly has more tokens than fit."""


def check_length(encode: Callable[[str], Sequence[int]], text: str, max_tokens: int) -> None:
    """Read on in the text until it is known to be too long, or short enough to be made into tokens at once.

    Raises:
        TooLong: it has more than `max_tokens` tokens.
    """
    if len(text) <= CHEAP * max_tokens:
        return
    count = 0
    for start in range(0, len(text), PIECE):
        count += len(encode(text[start : start + PIECE]))
        if count > SURE * max_tokens:
            raise TooLong(f"The messages have more than {max_tokens} tokens.")
