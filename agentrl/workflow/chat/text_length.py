"""Texts that are much too long for the model are noticed before all of them is made into tokens, which takes seconds."""

from collections.abc import Callable, Sequence

from agentrl.workflow.errors import ModelError

CHEAP = 4
"""A text of so many characters for each token that fits is made into tokens at once."""
SURE = 2
"""Tokens of pieces, counted apart, that are so many times what fits are too many whatever the seams cost."""
PIECE = 65_536
"""Characters that are counted at once."""


class TooLong(ModelError):
    """A text has surely more tokens than fit."""


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
