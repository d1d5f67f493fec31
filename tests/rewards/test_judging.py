"""Judging what model-written code returned: in a process that may be killed, in a few of them, and never as a system's failure
what a value did nor as a value's what the system did."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from agentrl.workflow.errors import InfraError
from agentrl.workflow.judging import code_judge
from agentrl.workflow.sandbox import CodeResult, exact_json
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.tools.python import sandbox
from tests.rewards.test_code import box as box

MODULUS = 2**61 - 1
"""Python hashes whole numbers by their remainder of this."""
COLLIDING = [number * MODULUS for number in range(40_000)]
HOSTILE = {
    "a number beyond any float": exact_json.encode(10**400),
    "a number of 100,000 digits": exact_json.encode(10**100_000),
    "as decimal digits": "1" + "0" * 100_000,
    "NaN": exact_json.encode(float("nan")),
    "infinity": exact_json.encode(float("inf")),
    "1e999": "1e999",
    "half a surrogate pair": exact_json.encode("\ud800"),
    "a megabyte of text": exact_json.encode("x" * 1_000_000),
    "a megabyte that is long to escape": exact_json.encode("\\" * 500_000),
    "nested as deep as it may": "[" * 190 + "]" * 190,
    "nested deeper than one may": "[" * 390 + "]" * 390,
    "nested without end": "[" * 500_000,
    "no plain data": '{"$nonsense": 1}',
    "no JSON": "\x00\ud800",
    "nothing": "",
    "a set of lists": '{"$set": [[]]}',
    "a dict of nothing": '{"$dict": [1]}',
    "many empty lists": "[" + "[]," * 340_000 + "[]]",
}
TOO_MUCH = {
    "a set of numbers of one hash": '{"$set": ' + json.dumps(COLLIDING) + "}",
    "a dict of numbers of one hash": '{"$dict": ' + json.dumps([[number, 0] for number in COLLIDING[:36_000]]) + "}",
}
CASES = [
    Case((), 1.5, "near", 0.1),
    Case((), 7, "equal"),
    Case((), {1, 2, 3}, "equal"),
    Case((), {"a": [1.0]}, "exact"),
    Case((), 10**400, "equal"),
    Case((), 10.0**300, "near", 1e-6),
]


pytestmark = pytest.mark.usefixtures("box")


@pytest.fixture
def anew() -> Iterator[None]:
    """Judges that nobody has used, and that nobody uses afterwards."""
    code_judge.judges.forget()
    yield
    code_judge.judges.forget()


@pytest.mark.parametrize("name", HOSTILE)
def test_code_judge_fails_only_hostile_value(name: str) -> None:
    pairs = [(case.text, HOSTILE[name]) for case in CASES]
    expected = [False] * 4 + [name == "a number beyond any float", False]
    assert code_judge.passed([(CASES[0].text, "1.45"), *pairs, (CASES[1].text, "7")]) == [True, *expected, True]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow
def test_code_judge_compares_hostile_expected_value(name: str) -> None:
    """What a dataset expects, where it is plain data at all."""
    try:
        value = exact_json.decode(HOSTILE[name])
        cases = [Case((), value, rule, 0.1).text for rule in ("exact", "equal", "near")]
    except ValueError:
        return
    for found in ("[1]", "1", '{"$set": [1]}'):
        assert code_judge.passed([(case, found) for case in cases]) == [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", TOO_MUCH)
def test_code_judge_fails_value_slow_to_build(name: str) -> None:
    """It took the worker's own lock for 21 s."""
    began = time.process_time()
    pairs = [(CASES[0].text, "1.5"), (CASES[2].text, TOO_MUCH[name]), (CASES[1].text, "7")]
    assert code_judge.passed(pairs) == [True, False, True]
    assert time.process_time() - began < 5


@pytest.mark.slow
def test_code_judge_values_share_cpu_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[CodeResult] = []
    ask = code_judge.asked
    monkeypatch.setattr(code_judge, "asked", lambda function, args: results.append(ask(function, args)) or results[-1])
    monkeypatch.setattr(code_judge, "WHOLE_CPU_SECONDS", 3.0)
    bad = TOO_MUCH["a set of numbers of one hash"]
    assert (
        code_judge.passed([(CASES[1].text, "7"), *[(CASES[0].text, bad)] * 20, (CASES[1].text, "7")]) == [True] + [False] * 21
    )
    assert sum(result.cpu_seconds for result in results) < 3.0 + 2 * code_judge.LIMITS.cpu_seconds


def test_code_judge_lost_is_replaced() -> None:
    assert code_judge.passed([(CASES[1].text, "7")]) == [True]
    sandbox().close()  # all processes of its sessions end
    sandbox.forget()
    assert code_judge.passed([(CASES[1].text, "7")]) == [True]


def test_code_judge_lost_every_time_is_system_failure(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_judge, "_source", lambda module: "import os\ndef verdicts(pairs): os.kill(os.getppid(), 9)")
    with pytest.raises(InfraError, match="failed while it ran a judge"):
        code_judge.passed([(CASES[1].text, "7")])


def test_code_judge_start_failure_is_system_failure(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_judge, "_source", lambda module: "raise SystemExit(1)")
    with pytest.raises(InfraError, match="did not start"):
        code_judge.passed([(CASES[1].text, "7")])


def test_code_judge_runs_at_most_one_session_per_core() -> None:
    pairs = [(CASES[1].text, str(number)) for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pair: code_judge.passed([pair])[0], pairs)) == [number == 7 for number in range(16)]
    assert code_judge.judges.idle == (os.cpu_count() or 1)


def test_exact_json_writes_truth_of_endless_iterator() -> None:
    assert exact_json.encode(count()) == '{"$object": true}'
    assert list(exact_json.decode(exact_json.encode(iter([1, (2,)])))) == [1, (2,)]


def test_code_judge_without_values_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_judge, "asked", None)
    assert code_judge.passed([]) == []
