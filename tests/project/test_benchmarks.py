"""The benchmark runs, gives every side the same work, and computes the memory that is used."""

import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import torch

from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from bench.performance import __main__ as program
from bench.performance import decode, growth, memory, memory_ours, report, samplers, synthetic, ui
from bench.performance.__main__ import ON_REQUEST, SUBJECTS
from bench.performance.models import HALF_BILLION, shape_of
from bench.performance.recorded import GROUP_SIZE, GROUPS, recorded
from bench.performance.samplers import Work
from bench.performance.update_ours import groups_of

MIB = 2**20


@pytest.mark.parametrize("subject", SUBJECTS + ON_REQUEST)
def test_benchmark_subjects_load(subject: str) -> None:
    assert callable(import_module(f"bench.performance.{subject}").measure)


def test_benchmark_measures_tiny_cases_and_exits_1_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FILE", tmp_path / "build" / "bench.json")
    dtypes = ("float32", "bfloat16")
    monkeypatch.setattr(decode, "CASES", [decode.Case("tiny", dtype, 2, 4, ("matmuls",), rounds=1) for dtype in dtypes])
    matmuls = samplers.matmuls

    def unable(model: torch.nn.Module, work: Work) -> samplers.Sampler:
        if next(model.parameters()).dtype == torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support avx_ne_convert")
        return matmuls(model, work)

    monkeypatch.setattr(samplers, "matmuls", unable)
    with pytest.raises(SystemExit) as ended:
        program.main(["decode"])
    assert ended.value.code == 1
    assert "failed: RuntimeError: bf16 path needs" in capsys.readouterr().out
    rows = json.loads(report.FILE.read_text())["rows"]
    assert [row["name"] for row in rows if "ratio" in row] == ["decode tiny float32, 2 slots, equal"]
    assert [row["error"] for row in rows if "error" in row] == ["RuntimeError: bf16 path needs the cpu support avx_ne_convert"]


@pytest.mark.slow
def test_benchmark_of_growth_reads_all_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "SHAPES", {"small": {"only": 4}})
    monkeypatch.setattr(growth, "REPETITIONS", 1)
    monkeypatch.setattr(growth, "OF_SUMS", 1)
    measured = growth.measure()
    assert measured.unmeasured == []
    assert [len(table.rows) > 3 for table in measured.tables] == [True] * 4
    assert len(measured.comparisons) == 4


def test_benchmark_of_page_asks_valid_requests_with_all_filters(sqlite: Database) -> None:
    with sqlite.engine.begin() as tx:
        synthetic.fill(tx, {"only": 4})
    requests = ui.paths_of(sqlite)
    filters = {name for path, asked in requests.values() if path.endswith("/episodes") for name in asked} - {"sort"}
    assert filters == {field.name for field in fields(EpisodeFilter)} - {"run", "since"}
    page = ui.Asker(sqlite)
    for path, asked in requests.values():
        page.ask(path, asked)  # it fails if the page does not answer with 200


def test_benchmark_gives_both_sides_of_update_same_rows() -> None:
    data, groups = recorded(), groups_of(recorded())
    assert [group.episodes[0].steps[0].prompt_ids for group in groups] == data.prompts
    assert [[episode.steps[0].sampled_ids for episode in group.episodes] for group in groups] == data.completions
    assert [[episode.reward for episode in group.episodes] for group in groups] == data.rewards
    assert len(set(data.prompts)) == GROUPS
    assert all(len({episode.reward for episode in group.episodes}) == GROUP_SIZE for group in groups)


def test_benchmark_half_billion_model_has_known_weight_count() -> None:
    shape = shape_of(HALF_BILLION, rank=8, element=4)
    assert shape.lora == 4_399_104
    assert shape.base + shape.embeddings + shape.small + shape.lora == 498_431_872


def test_benchmark_memory_is_of_microbatches_of_trainer() -> None:
    sampled = memory_ours.PROMPT_TOKENS + memory_ours.SAMPLED_TOKENS
    assert memory.microbatch({"update.gradient_checkpointing": True, "update.microbatch_tokens": 2 * sampled}) == 2 * sampled
    without = memory.parts(memory.CPU, "update", {})
    with_it = memory.parts(memory.CPU, "update", {"update.gradient_checkpointing": True})
    assert sum(with_it.values()) < sum(without.values()) / 4
