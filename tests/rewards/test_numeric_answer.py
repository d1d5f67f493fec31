"""numeric_answer: which number each form of writing is, on every road to an answer, and which forms are no number."""

import json
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.errors import RewardError
from agentrl.workflow.rewards.numeric_answer import read_answer, read_reference
from tests.data.test_datasets import published_gsm8k as published_gsm8k
from tests.rewards.test_rewards import numeric

NUMBERS = {
    "72": ["72", "+72", "072", "72.", "72.00", "72!", "72...", "72\\\\", "72 clips"],
    "-72": ["-72", "\u221272", "\u201372", "-72.0", "-$72", "$-72", "-$ 72", "-\u20ac72", "**-72**", "$-72$"],
    "1200": ["1200", "1,200", "1 200", "1\u00a0200", "1\u202f200", "1\u2009200", "1{,}200", "1,\\!200", "1\\,200",
    "$1,200.00"],
    "1234567.25": ["1,234,567.25", "1 234 567.25", "\u20ac1 234 567.25", "1234567.25"],
    "1.2e3": ["1.2e3", "1.2E3", "1.2e+3", "12e2", "$1.2e3", "1200"],
    "0.012": ["1.2e-2", "1.2E\u22122", ".012", "0.0120"],
    "18": [
        "$18", "\\$18", "$ 18", "US$18", "\u20ac18", "\u20ac 18", "18\u20ac", "18 \u20ac", "\u00a318", "\u00a518", "\u20b918",
        "18\u00a2", "18$", "18%", "18\\%", "18 %", "%18", "18\u00b0", "18\u00b0C", "18^\\circ", "18 dollars", "18dollars",
        "18kg", "18 kg", "18cm", "18km/h", "18 km/h", "18cm^2", "18 cm^2", "18 m2", "18 m\u00b2", "18 cm^{3}", "18/hour",
        "$18/hr", "18-liter jugs", "18pm", "18th", "18\u5143",
        "**18**", "*18*", "__18__", "`18`", "**$18**", "**18** clips", "**18 clips**", "18 **clips**", "<18>",
        "$18$", "$$18$$", "$$\n18\n$$", "\\(18\\)", "\\( 18 \\)", "\\[18\\]", "$\\mathbf{18}$", "\\text{18}",
        "\\textbf{18 clips}", "18\\text{ clips}", "18\\text{clips}", "18~\\mathrm{kg}", "\\mathbf{\\text{18}}",
    ],
}  # fmt: skip
NOTHING = [
    "18x", "18 5", "1 20", "1,20", "1,200 5", "1,200,5", "12 3456", "1234 567", "1.5 200", "18'000", "1_800", "18,5",
    "18 1/2",
    "3:30", "3:30 pm", "18:1", "1/2", "48/2", "\\frac{1}{2}", "18\\frac{1}{2}", "18 \\frac{1}{2}", "\\frac{18}{1}", "2*9",
    "2**4", "10^3", "10^{3}", "2\u00d79", "18\u00f71", "18\\times1", "18\\pi", "2\u03c0", "sqrt(18)", "f(18)", "\\sqrt{18}",
    "5\\sqrt{18}", "18\u00b2", "18\u00bd", "\u00bd", "\u00b118", "x18", "v18", "CO18", "0x18", "18k",
    "18K", "18M", "18bn", "$18m", "$18k", "18e", "18e3e3", "18ab", "18abc", "a18b", "x_18", "x^18", "GPT-18", "--18", "5--18",
    "1.8.0", "1.2.3.18", "2024-05-18", "555-123-0018", "(5)-18", "1+2+15", "18\u0662", "\u0661\u0668", "\uff11\uff18",
    "1e1234567", "nan", "inf", "-Infinity", "NaN", "eighteen", "-", "$", "%", "\ud800", "{", "}",
]  # fmt: skip
BEGINNINGS = [
    "100-18", "48 / 2", "18 x 1", "18 x", "18 * 1", "18 + 0", "18 = 18", "18 or 19", "18, 19", "18 to 20", "x = 18",
]  # fmt: skip
"""In a text their last word is a number; after `####` and in a box they are more than one."""

ROADS = ["{}", "It is {}", "So 5 + 5 and\n\n{}", "#### {}", "10 - 3 = 7\n#### {}\n\n7 it is not", "####\n{}", "\\boxed{{{}}}"]
MARKED = ROADS[3:]


@pytest.mark.parametrize(("number", "form"), [(number, form) for number, forms in NUMBERS.items() for form in forms])
def test_read_answer_reads_each_form_in_each_place(number: str, form: str) -> None:
    for road in ROADS:
        if not ("\n" in form and "#### {}\n" in road):
            assert read_answer(road.format(form)) == Decimal(number), road
    assert numeric(form, number) == numeric(number, form) == 1.0


@pytest.mark.parametrize("form", NOTHING)
def test_read_answer_takes_no_text_that_only_contains_number(form: str) -> None:
    for road in ROADS:
        if form.strip() or road in MARKED:
            read = read_answer(road.format(form))
            assert read is None or (road not in MARKED and not any(map(str.isdecimal, form))), road


@pytest.mark.parametrize("form", BEGINNINGS)
def test_read_answer_after_mark_rejects_longer_text(form: str) -> None:
    for road in MARKED:
        assert read_answer(road.format(form)) is None, road
    assert read_answer(form) is not None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### \\boxed{18}", "18"), ("#### $\\boxed{18}$", "18"), ("#### **\\boxed{\\$18}**", "18"),
        ("#### \\(\\boxed{1{,}234}\\)", "1234"), ("\\boxed{5} or \\boxed{18\\text{ clips}}", "18"),
        ("\\boxed{\\frac{1}{2}}", None), ("#### \\boxed{\\frac{1}{2}}", None), ("\\boxed{18} (of 40)", "18"),
        ("\\boxed{\\text{\\textbf{18}} kg}", "18"),
        ("\\boxed{18", "18"), ("\\boxed{", None), ("\\boxed{\\{1, 18\\}}", None), ("\\boxed{(1, 18)}", None),
        ("#### 5\n\\boxed{18}", "5"), ("\\boxed{5}\n#### 18", "18"), ("18\n####", None), ("18 \\boxed{}", None),
        ("$x=18$", "18"), ("{\"answer\": 18}", "18"), ("Answer:18", "18"), ("48 + 24 = 72", "72"), ("48/2=24", "24"),
        ("\u7b54\u6848\u662f18\u3002", "18"), ("\u2705 18 \u2705", "18"), ("at 3:30, 18", "18"), ("100-72", "72"),
        ("1, 2, 18", "18"),
        ("18 on the way to v2", None), ("18 x^2", None), ("1. First\n2. Second\n\n18", "18"), ("Step 1. 18", "18"),
    ],
)  # fmt: skip
def test_read_answer_examples(text: str, number: str | None) -> None:
    assert read_answer(text) == (None if number is None else Decimal(number))


NOT_ONE_NUMBER = [
    "x > 5", "5 > x", "2x + z = 1", "19, 46 and 82", "\\pm 7", "between 3 and 9", "3 to 9", "5 million", "7 or more", "7\n8",
    "about 7",    "\\boxed{7} of 9", "#### 7 or 8", "7 #### ", *NOTHING, *BEGINNINGS,
]  # fmt: skip


@pytest.mark.parametrize("reference", NOT_ONE_NUMBER)
def test_numeric_answer_refuses_references_not_of_one_number(reference: str) -> None:
    with pytest.raises(RewardError, match="is not one number"):
        numeric("7", reference)


def test_read_answer_takes_last_word_with_digit_or_none() -> None:
    for form in NOTHING:
        if any(map(str.isdecimal, form)):
            assert read_answer(f"It is 18.\nOr {form}") is None, form


@given(st.integers(-(10**30), 10**30), st.integers(0, 6), st.sampled_from(["{}", "#### {}", "\\boxed{{{}}}", "so {}."]))
def test_read_answer_reads_decimals_and_groups_back(number: int, places: int, shape: str) -> None:
    value = Fraction(number, 10**places)
    whole, rest = divmod(abs(number), 10**places)
    decimals = f".{rest:0{places}}" if places else ""
    sign = "-" if number < 0 else ""
    for digits in (f"{whole}", f"{whole:,}", f"{whole:,}".replace(",", " ")):
        assert read_answer(shape.format(f"{sign}{digits}{decimals}")) == value
    assert read_answer(shape.format(f"{number}e-{places}")) == value


PARTS = [*"0123456789.,:' -+$%*/^\\{}()[]ex#\n\u00a0\u20ac\u0662", "####", "\\boxed{", "\\text{", "kg"]


@given(st.lists(st.sampled_from(PARTS)))
def test_read_answer_accepts_any_text(parts: list[str]) -> None:
    text = "".join(parts)
    read = read_answer(text)
    assert read is None or read.is_finite()


def test_read_answer_reads_published_gsm8k(published_gsm8k: Path) -> None:
    lines = [line for split in ("train", "test") for line in (published_gsm8k / f"{split}.jsonl").read_text().splitlines()]
    for row in map(json.loads, lines):
        written = row["answer"].rpartition("####")[2].strip()
        value = int(written.replace(",", ""))
        assert read_answer(row["answer"]) == read_answer(written) == value
        assert {read_answer(shape.format(written)) for shape in ("It is ${}.", "#### {} dollars", "\\boxed{{{}}}")} == {value}


LONG, MANY = 10**5, 50_000
HOSTILE = [
    "9" * LONG, "-" + "9" * LONG, "1," + "000," * LONG, "1 " + "000 " * LONG, "0." + "0" * LONG + "1", "1e999999",
    "1e-999999",
    "1e" + "9" * LONG, "7e" * LONG, "NaN", "inf", "-Infinity", "\ud800", "71\ud800", "\0", "7" * MANY, "x" * MANY,
    "7-" * MANY, "\\text{" * MANY, "\\text{7}" * MANY, "{" * MANY, "\\boxed{" * MANY, "####" * MANY, "$" * MANY, " " * MANY,
    "7 " * MANY, "7," * MANY, "a(7" * MANY, ")-" * MANY, "m^{2" * MANY, "\n7" * MANY, "**" * MANY,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_numeric_answer_compares_hostile_values_exactly_and_fast(text: str) -> None:
    began = time.process_time()
    for road in ("{}", "#### {}", "\\boxed{{{}}}"):
        assert numeric(road.format(text)) == 0.0
    if read_reference(text) is None:  # a task without a number is a fault of its dataset, and loud
        with pytest.raises(RewardError, match="is not one number"):
            numeric("#### 72", reference=text)
    else:
        assert (numeric("#### 72", reference=text), numeric(text, reference=text)) == (0.0, 1.0)
    assert time.process_time() - began < 6  # of a tenth of a second or so: nothing is quadratic


def test_numeric_answer_compares_long_numbers_to_last_digit() -> None:
    most = "9" * LONG
    assert numeric(f"#### {most}", reference=most) == 1.0
    assert numeric(f"#### {most[:-1]}8", reference=most) == 0.0
    assert numeric(f"#### {most}.0", reference=most) == 1.0
    assert numeric("#### 1e5000", reference="1" + "0" * 5000) == 1.0
    assert numeric("#### 1e5000", reference="1" + "0" * 4999) == 0.0


@given(st.text(max_size=40), st.integers(-999, 999))
def test_read_answer_ignores_text_before_mark(text: str, number: int) -> None:
    assert read_answer(f"{text}\n#### {number}") == number
