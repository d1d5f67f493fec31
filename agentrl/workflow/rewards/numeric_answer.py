r"""numeric_answer: 1.0 if the final answer equals the reference's number exactly, else 0.0.

The answer is read from the last turn. This turn must not call a tool, and must have ended by itself: a turn that was cut off at
a limit is not an answer. The answer is the first of these that exists in its text:

1. the beginning of the first non-empty line after the last `####`: a number, or a box with a number;
2. the beginning of the text in the last `\boxed{...}`;
3. the last word that contains a digit.

A reference is read more strictly. It is one such number, alone or after the last `####`, and words may follow the number. Other
references are an error.

In each of these cases a word, which is a run of characters without a space, must be a number and nothing else. Otherwise there
is no answer:

- `72`, `+72`, `72.00`, `72.` and `.5` are numbers; the minus sign may be `-`, U+2212 or an en dash;
- `1,200` and `1 200` are numbers (the space may be a thin or a no-break space): thousands in groups of three. `1 20`, `1,20`
    and `1,200 5` are not;
- `1.2e3` is 1200;
- a currency sign may stand before or after the number (`$72`, `-€72`, `US$72`, `72 €`), and a known unit directly after it
    (`72%`, `72kg`, `72cm^2`, `72/hour`, `72-liter`, `72nd`). `72x`, `72k`, `x72`, `v2`, `0x72` and `$5m` are not numbers;
- the number may stand in `**72**`, `$72$`, `$$72$$`, `\(72\)`, `\[72\]` and `\text{72}`; `1{,}200` and `1\,200` are 1200;
- a part of a longer expression is not a number: `3:30`, `1/2`, `\frac{1}{2}`, `2*72`, `10^3`, `2\pi`, `sqrt(72)`, `1.2.3`,
    `2024-05-18`. If one `-` or `+` stands between two numbers, as in `100-72`, the answer is the second number.

After `####` and in a box, the text must begin with the number, and the number must not be the beginning of a longer expression.
`#### 100-72`, `#### 48 / 2`, `#### 72 x 1` and `#### 72 or 73` are not answers; `#### 72 clips` is an answer. A word after a
space is ignored, whatever it means.

Numbers are compared exactly, however long they are. Every step takes time linear in the length of the text.
"""

import re
from decimal import Decimal

from agentrl.workflow.trajectory import Episode

BOX = "\\boxed{"

_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd\u20aa\u20ab\u20b4\u20ba\u20a6\u0e3f\u00a2"
_LENGTHS = "mm|cm|dm|km|m|in|inch|inches|ft|foot|feet|yd|yards?|mi|miles?|met(?:er|re)s?|units?"
_UNITS = (
    f"%|\u00b0[CF]?|(?:{_LENGTHS})[\u00b2\u00b3]?|mg|g|kg|grams?|oz|ounces?|lbs?|tons?|ml|mL|cl|dl|l|L|lit(?:er|re)s?|gal|gallons?"
    "|ms|s|secs?|seconds?|mins?|minutes?|h|hrs?|hours?|days?|weeks?|months?|years?|am|pm|AM|PM|mph|kph|kmh|C|F|percent|degrees?"
    "|st|nd|rd|th|W|kW|kWh|kcal|cal|V|Hz|kHz|MHz|GHz|[kKMGT][bB]|USD|EUR|GBP|dollars?|cents?|euros?|pounds?|points?|people"
)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]{1,3}(?: [0-9]{3})++|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++"

_NUMBER = re.compile(
    rf"(?P<sign>[-+])?(?:(?P<money>%|[A-Z]{{0,3}}[{_CURRENCY}]) ?(?P<inner_sign>-)?)?"
    rf"(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?[0-9]{{1,6}})?"
    rf"(?(money)|(?:{_UNITS}|[{_CURRENCY}])?)(?:[-/][A-Za-z]{{2,}}+|/[hs])?"
)
_FIRST_OF_TWO = re.compile(r"[0-9][0-9,.]*+[-+](?=[$.0-9])")

# What holds a word together: ASCII, Latin, Greek and Cyrillic letters, digits of any script, signs of mathematics. In other
# scripts no space parts a number from its words.
_WORD = re.compile(
    rf"(?:[A-Za-z_\d\u00aa-\u052f\u2070-\u209f\u2150-\u218f\u2200-\u221f.\\{{}}^*/%+{_CURRENCY}-]"
    r"|(?<=\d)[,:' ](?=\d)"  # between digits
    rf"|(?<=[-+][{_CURRENCY}])[ ](?=\d)"  # -$ 5
    r"|(?<=[A-Za-z])\((?=[-+.]?\d)|\)(?=[-+*/^]))+"  # sqrt(2), (1)-2
)
_TO_LAST_DIGIT = re.compile(r".*\d", re.DOTALL)
_BEFORE, _BEHIND = "*_\u00ab", "*_\u00bb.}$\\"
"""Characters at the beginning and at the end of a word that do not belong to its number."""

_FENCES = re.compile(r"\$\$|\\[()\[\]]")
_SPACES = re.compile(r"[\u00a0\u2009\u202f~]|\\[,;: ]")
_PLAIN = re.compile(r"\\(?:text|textbf|textit|textrm|mathbf|mathrm|mathit|mbox) ?\{([^{}]*+)\}")
_POWER = re.compile(rf"(?<![A-Za-z])({_LENGTHS})(?:\^?([23])|\^\{{([23])\}})(?![A-Za-z0-9])")

_OPENS = re.compile(rf"[\s*_`<]*(?:[{_CURRENCY}](?![\d.+-])\s*)?")
_GOES_ON = re.compile(
    r"\s*(?:[\^=\u00d7\u00f7\u00b7]|\*(?!\*[A-Za-z])|:\s*\d|/(?! ?[A-Za-z]{2})|[-+x](?=\s*[$\d(])|[xyz](?![A-Za-z])"
    r"|\\(?:times|cdot|div|d?frac|sqrt|pi|pm)|,\s*[-$\d]|(?:or|and|to)\s+[-$\d])"
)
"""A pattern of the text after a number that is only the beginning of a longer expression, or only one of several answers."""

_NO_REST = re.compile(
    r"[\d=<^\u00b1\u2248\n]|>\s*\S|\b(?:hundred|thousand|million|billion|trillion|dozen|or|and|to|more|less)s?\b", re.IGNORECASE
)
"""A pattern of text that must not follow the number of a reference, because it would be a part of the answer."""


def numeric_answer(episode: Episode) -> float:
    """Return 1.0 if the answer is right, else 0.0. Raise ValueError if the task's reference is not one number."""
    gold = read_reference(episode.task.reference)
    if gold is None:
        raise ValueError(
            f"the reference {episode.task.reference!r:.80} of task {episode.task.key!r} is not one number, "
            "such as 72 or 1,200 or 1.2e3; the reward math_answer reads fractions and formulas"
        )
    if episode.stop_reason != "answered":
        return 0.0
    return float(read_answer(episode.final_answer) == gold)


numeric_answer.reference_form = "#### {}"  # type: ignore[attr-defined]


def read_reference(text: str) -> Decimal | None:
    """Return the number of a reference; None if the reference is not one number.

    The number may follow the last `####`. Words may follow the number (`72 clips`), but no other number, mathematical sign, or
    word that changes the number (`5 million`).
    """
    text = _normal(text.rpartition("####")[2]).strip()
    text = text[_OPENS.match(text).end() :]  # type: ignore[union-attr]
    if text.startswith(BOX):
        inner = _boxed(text)
        if text[len(BOX) + len(inner) :].strip("} \t$*_`."):
            return None
        text = inner
        text = text[_OPENS.match(text).end() :]  # type: ignore[union-attr]
    word = _WORD.match(text)
    return None if word is None or _NO_REST.search(text, word.end()) else _leading(text)


def read_answer(text: str) -> Decimal | None:
    """Return the number that the text gives as its answer; None if the text has no such number."""
    _, marker, answer = text.rpartition("####")
    if marker:
        line = _normal(answer).lstrip().partition("\n")[0]
        line = line[_OPENS.match(line).end() :]  # type: ignore[union-attr]
        return _leading(_boxed(line) if line.startswith(BOX) else line)
    _, box, answer = text.rpartition(BOX)
    return _leading(_boxed(_normal(box + answer))) if box else _last(_normal(text))


def _normal(text: str) -> str:
    """Normalise the typography of a text: one kind of minus, one kind of space, and tabs for LaTeX delimiters."""
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("\u2019", "'")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("{,}", ",").replace("\\!", "")
    text = text.replace("^{\\circ}", "\u00b0").replace("^\\circ", "\u00b0")
    text = _SPACES.sub(" ", _FENCES.sub("\t", text))
    for _ in range(3):  # one within the other
        text = _PLAIN.sub("\t\\1\t", text)
    return _POWER.sub(lambda unit: unit[1] + "\u00b2\u00b3"[int(unit[2] or unit[3]) - 2], text)


def _boxed(text: str) -> str:
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[len(BOX) : brace.start()]
    return text[len(BOX) :].partition("\n")[0]


def _leading(text: str) -> Decimal | None:
    """Return the number at the beginning of the text; None if a longer expression begins there."""
    text = text[_OPENS.match(text).end() :]  # type: ignore[union-attr]
    word = _WORD.match(text)
    return None if word is None or _GOES_ON.match(text, word.end()) else _value(word[0])


def _last(text: str) -> Decimal | None:
    digit = _TO_LAST_DIGIT.match(text)
    if digit is None:
        return None
    line = text[text.rfind("\n", 0, digit.end()) + 1 :].partition("\n")[0]
    word = [word[0] for word in _WORD.finditer(line) if any(map(str.isdecimal, word[0]))][-1]
    word = word.lstrip(_BEFORE)
    return _value(word[first.end() :] if (first := _FIRST_OF_TWO.match(word)) else word)


def _value(word: str) -> Decimal | None:
    number = _NUMBER.fullmatch(word.rstrip(_BEHIND))
    if number is None:
        return None
    value = Decimal(re.sub("[, ]", "", number["digits"]) + (number["exponent"] or ""))
    return value.copy_negate() if "-" in (number["sign"], number["inner_sign"]) else value
