"""The benchmark measures what it says: ratios by round, memory of the work alone, the same work on every side."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import SandboxUnavailable
from agentrl.workflow.models.policy import Policy
from bench.performance import __main__ as program
from bench.performance import decode, growth, memory, memory_ours, report, samplers, synthetic
from bench.performance.cases import CannotHere, Cases, Unmeasured
from bench.performance.models import HALF_BILLION, shape_of
from bench.performance.processes import Side, run
from bench.performance.recorded import GROUP_SIZE, GROUPS, recorded
from bench.performance.report import Comparison, Measured, Table
from bench.performance.samplers import Work
from bench.performance.update_ours import groups_of
from tests.support.small_models import tiny_random

MIB = 2**20


def test_the_ratio_is_of_each_round_and_not_of_the_medians() -> None:
    compared = Comparison("a", ours=[1, 8, 3], other=[2, 4, 10], unit="s", against="them", better="less")
    row = compared.row()
    assert (row["ours"], row["other"], row["ratio"], row["spread"]) == (3, 4, 0.5, [0.3, 2.0])


def test_measuring_one_subject_again_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FILE", tmp_path / "build" / "bench.json")

    def measured(name: str) -> Measured:
        return Measured([Table(name, ["what"], [[1]], 0.0)], [Comparison(name, [1], [2], "s", "them", "less")])

    for subject, name in [("first", "old"), ("second", "other"), ("first", "new")]:
        report.keep(subject, measured(name))
    kept = json.loads(report.FILE.read_text())
    assert {row["subject"]: row["name"] for row in kept["rows"]} == {"first": "new", "second": "other"}
    assert {subject: found["tables"][0]["title"] for subject, found in kept["subjects"].items()} == {
        "first": "new",
        "second": "other",
    }
    assert set(kept["subjects"]["first"]["versions"]) == {"python", "torch", "transformers", "trl", "agentrl"}


def test_a_subject_that_failed_whole_keeps_what_it_had_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FILE", tmp_path / "build" / "bench.json")
    report.keep("first", Measured([Table("t", ["what"], [[1]], 0.0)], [Comparison("a", [1], [2], "s", "them", "less")]))
    for why in ("once", "again"):
        report.keep("first", Measured([], unmeasured=[Unmeasured("first", why, failed=True)]))
    kept = json.loads(report.FILE.read_text())
    assert [row.get("error", row["name"]) for row in kept["rows"]] == ["a", "again"]
    assert kept["subjects"]["first"]["tables"][0]["title"] == "t"


@pytest.mark.slow
def test_the_growth_benchmark_reads_all_that_it_says_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "SHAPES", {"small": {"only": 4}})
    monkeypatch.setattr(growth, "REPETITIONS", 1)
    monkeypatch.setattr(growth, "OF_SUMS", 1)
    measured = growth.measure()
    assert measured.unmeasured == []
    assert [len(table.rows) > 3 for table in measured.tables] == [True] * 4
    assert len(measured.comparisons) == 4


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are kept in place of `build/bench.json`."""
    monkeypatch.setattr(report, "FILE", tmp_path / "build" / "bench.json")
    return report.FILE


def subject(monkeypatch: pytest.MonkeyPatch, name: str, *errors: Exception | None) -> None:
    """A subject of so many cases: each raises its error, or has a number where it is None."""

    def measure() -> Measured:
        cases, rows, comparisons = Cases(), [], []
        for number, error in enumerate(errors):
            with cases.case(f"{name} {number}"):
                if error:
                    raise error
                rows.append([f"{name} {number}", 1.0])
                comparisons.append(Comparison(f"{name} {number}", [1], [2], "s", "them", "less"))
        table = Table(name, ["what", "seconds"], [*rows, *cases.rows()], 0.0)
        return Measured([table], comparisons, cases.unmeasured)

    monkeypatch.setitem(sys.modules, f"bench.performance.{name}", SimpleNamespace(measure=measure))
    monkeypatch.setattr(program, "SUBJECTS", (*program.SUBJECTS, name))


def test_a_case_that_fails_says_so_in_its_row_the_rest_goes_on_and_the_program_ends_with_1(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subject(monkeypatch, "first", None, RuntimeError("bf16 path needs\nframe #0: 0x7f"), None)
    subject(monkeypatch, "second", None)
    with pytest.raises(SystemExit) as ended:
        program.main(["first,second"])
    assert ended.value.code == 1
    said = capsys.readouterr()
    table, last = said.out.split("== first")[1], said.out.split("== ours / other")[1]
    for shown in (table, last):
        assert re.search(r"^first 1 +failed: RuntimeError: bf16 path needs$", shown, re.MULTILINE)
    assert all(name in last for name in ("first 0", "first 2", "second 0"))
    assert "Traceback" in said.err
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert [name for name, row in rows.items() if "ratio" in row] == ["first 0", "first 2", "second 0"]
    failed = {"subject": "first", "name": "first 1", "error": "RuntimeError: bf16 path needs", "failed": True}
    assert rows["first 1"] == failed


@pytest.mark.parametrize("error", [CannotHere("no such instruction"), SandboxUnavailable("no user namespaces")])
def test_a_case_that_this_machine_cannot_do_is_said_and_is_no_failure(
    error: Exception, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subject(monkeypatch, "first", error, None)
    program.main(["first"])
    assert f"first 0  cannot run here: {error}" in capsys.readouterr().out


def test_a_subject_that_fails_outside_of_its_cases_is_said_and_the_others_go_on(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subject(monkeypatch, "second", None)
    subject(monkeypatch, "first")
    monkeypatch.setattr(sys.modules["bench.performance.first"], "measure", lambda: 1 / 0)
    with pytest.raises(SystemExit):
        program.main(["first", "second"])
    last = capsys.readouterr().out.split("== ours / other")[1]
    assert "first     failed: ZeroDivisionError: division by zero\n" in last
    assert "second 0" in last


def test_a_decoding_case_of_which_one_side_cannot_run_leaves_the_others_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = ("float32", "bfloat16")
    monkeypatch.setattr(decode, "CASES", [decode.Case("tiny", dtype, 2, 4, ("matmuls",), rounds=1) for dtype in dtypes])
    matmuls = samplers.matmuls

    def unable(model: torch.nn.Module, work: Work) -> samplers.Sampler:
        if next(model.parameters()).dtype == torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support avx_ne_convert")
        return matmuls(model, work)

    monkeypatch.setattr(samplers, "matmuls", unable)
    found = decode.measure()
    assert [len(row) for row in found.tables[0].rows] == [len(found.tables[0].columns), 2]
    assert [comparison.name for comparison in found.comparisons] == ["decode tiny float32, 2 slots, equal"]
    assert [case.why for case in found.unmeasured] == ["RuntimeError: bf16 path needs the cpu support avx_ne_convert"]


@pytest.fixture
def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A side that takes memory, gives it back, and takes some more when it works."""
    (tmp_path / "hungry.py").write_text(
        """
def prepare(before, during):
    bytearray(before)[::4096] = b"x" * (before // 4096)
    return lambda: len(b"x" * during)
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "hungry"


def test_a_peak_of_memory_is_that_of_the_work_and_not_of_what_came_before(hungry: str) -> None:
    ran = run(Side(hungry, "prepare", {"before": 400 * MIB, "during": 100 * MIB}))
    assert ran.value == 100 * MIB
    assert 90 < ran.peak_mib - ran.before_mib < 200


def test_a_side_that_fails_says_why(hungry: str) -> None:
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'many'"):
        run(Side(hungry, "prepare", {"many": 1}))


def test_every_way_to_sample_gives_each_row_its_length(tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(lora_r=0), str(tiny_random(tmp_path)), "cpu")
    with policy.sampling() as model:
        pass
    prompts = [(5, 6, number) for number in range(20, 26)]
    sample, engine = samplers.ours(policy, Work(prompts, [1, 5, 2, 9, 3, 4], slots=2))
    try:
        sample()
    finally:
        engine.close()
    samplers.generate(model, Work(prompts, [1, 5, 2, 9, 3, 4], slots=2))()
    for prepare in (samplers.bare, samplers.matmuls):
        prepare(model, Work(prompts[:2], [4, 4], slots=2))()


def test_both_sides_of_an_update_read_the_same_rows() -> None:
    data, groups = recorded(), groups_of(recorded())
    assert [group.episodes[0].steps[0].prompt_ids for group in groups] == data.prompts
    assert [[episode.steps[0].sampled_ids for episode in group.episodes] for group in groups] == data.completions
    assert [[episode.reward for episode in group.episodes] for group in groups] == data.rewards
    assert len(set(data.prompts)) == GROUPS
    assert all(len({episode.reward for episode in group.episodes}) == GROUP_SIZE for group in groups)


def test_the_half_billion_model_has_the_known_numbers_of_weights() -> None:
    shape = shape_of(HALF_BILLION, rank=8, element=4)
    assert shape.lora == 4_399_104
    assert shape.base + shape.embeddings + shape.small + shape.lora == 498_431_872


def test_the_memory_that_is_computed_is_of_the_microbatches_that_the_trainer_cuts() -> None:
    sampled = memory_ours.PROMPT_TOKENS + memory_ours.SAMPLED_TOKENS
    assert memory.microbatch({"update.gradient_checkpointing": True, "update.microbatch_tokens": 2 * sampled}) == 2 * sampled
    without = memory.parts(memory.CPU, "update", {})
    with_it = memory.parts(memory.CPU, "update", {"update.gradient_checkpointing": True})
    assert sum(with_it.values()) < sum(without.values()) / 4
