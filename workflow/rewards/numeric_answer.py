"""numeric_answer: 1.0 where the final answer is the reference's number exactly, else 0.0.

The answer is read from the last turn, which must have called no tool and must have ended by itself: a turn cut off by
a limit did not answer. In its text the answer is, in this order,

1. what follows the last `####`,
2. what the last `\\boxed{...}` holds,
3. the last number.

Signs of currency, thousands separators, `%` and a closing full stop are passed over; `72`, `$72.00`, `72%` and `72.`
are one number, and `1,200` is 1200. After `####` and in a box the number comes first and is not the beginning of a
computation: `#### 48/2` is no answer.
"""

import re
from fractions import Fraction

from workflow.trajectory import Episode

MAX_DIGITS = 300
BOX = "\\boxed{"
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-+])?(?:\$ ?(?P<inner_sign>-)?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
GOES_ON = re.compile(r"[,.]?[0-9]|\s*(?:[*/^=\u00d7\u00f7]|[-+x](?=\s*[$0-9(]))")
"""After a number: it was not the whole answer but the beginning of something longer."""


def numeric_answer(episode: Episode) -> float:
    """1.0 or 0.0.

    Raises:
        ValueError: the task's reference holds no number, so that no answer could be right.
    """
    gold = read_answer(episode.task.reference)
    if gold is None:
        raise ValueError(f"the reference {episode.task.reference!r:.80} of task {episode.task.key!r} holds no number")
    if episode.stop_reason != "answered":
        return 0.0
    return float(read_answer(episode.final_answer) == gold)


def read_answer(text: str) -> Fraction | None:
    """The number that a text gives as its answer; None where it gives none."""
    plain = text.replace("\u2212", "-").replace("\\$", "$")
    _, marker, answer = plain.rpartition("####")
    if marker:
        return _leading(answer)
    _, box, answer = plain.rpartition(BOX)
    if box:
        return _leading(answer.partition("}")[0])
    numbers = list(NUMBER.finditer(plain))
    return _value(numbers[-1]) if numbers else None


def _leading(text: str) -> Fraction | None:
    answer = text.replace("**", "").lstrip()  # bold
    number = NUMBER.match(answer)
    if number is None or GOES_ON.match(answer, number.end()):
        return None
    return _value(number)


def _value(number: re.Match[str]) -> Fraction | None:
    digits = number["digits"].replace(",", "")
    if len(digits) > MAX_DIGITS:
        return None
    negative = number["sign"] == "-" or number["inner_sign"] == "-"
    return Fraction(digits) * (-1 if negative else 1)
