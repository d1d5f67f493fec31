"""`--model RUN@N`: a run and `sft` go on from a run's policy, its LoRA as it is or merged, and say where they came from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.cli import submit as submitting
from agentrl.workers.requests import submit as submission
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.checkpoints.epoch_links import link_epochs
from agentrl.workflow.settings import settings
from agentrl.workflow.store import epoch_ends, run_names
from agentrl.workflow.store.connect import Database
from tests.faults.test_mending import a_worker, do_jobs
from tests.support.played_runs import value
from tests.support.published import published
from tests.support.small_models import quantised, tiny_random
from tests.support.typed import agentrl

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SMALL = (
    *("--dataset", "arithmetic", "--epochs", "1", "--max-tasks", "2", "--tasks-per-iteration", "2", "--group-size", "8"),
    *("--max-new-tokens", "4", "--max-steps", "1", "--learning-rate", "1e-9", "-s", "hooks=[tests.support.parity_hook:Lucky]"),
)
"""A run of one iteration that hardly moves."""

KINDS: dict[str, dict[str, Any]] = {"all weights": {"lora_r": 0}, "lora": {"lora_r": 4, "lora_alpha": 8.0}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    return tiny_random(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def worker(home: Path, migrated_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The database of this process, which does the jobs of what is submitted in it."""
    with a_worker(home, migrated_file) as database:
        monkeypatch.setattr(submitting, "send_run", lambda prepared, *_: submission.submit(database, prepared))
        yield database


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return load_file(sealed_folder.weights_of(Path(folder)))


def apart(one: Path | str, other: Path | str) -> float:
    """How far the weights of two checkpoints are from each other, at most."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_submit_continues_policy_of_another_run_and_names_it(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    made = published(worker, base, tmp_path / "out", KINDS[kind], versions=2, epochs=2)
    agentrl(capsys, "submit", *SMALL, "--model", "first@1", "--name", "second")
    do_jobs()
    row = run_names.find_run(worker, "second")
    assert (row["status"], row["base"]) == ("done", str(base))
    assert row["manifest"]["from"] == {"run": "first", "version": 1, "lora": "continue"}
    assert row["config"]["model"]["path"] == "first@1"
    assert {key: row["config"]["model"][key] for key in KINDS[kind]} == KINDS[kind]
    trained = value(worker, f"SELECT path FROM policies WHERE run_id = {row['id']} AND version = 1")
    assert (settings().root / "runs" / "second" / "epoch_1").readlink() == Path(Path(trained).name)
    assert apart(trained, made[0]) < 1e-7 < 1e-3 < apart(trained, made[1])

    agentrl(capsys, "submit", *SMALL, "--model", "second@epoch1", "--name", "third", "--eval-every", "1")
    do_jobs()
    third = run_names.find_run(worker, "third")
    assert third["manifest"]["from"] == {"run": "second", "version": 1, "lora": "continue"}
    assert (third["status"], third["config"]["model"]["path"]) == ("done", "second@1")
    assert value(worker, f"SELECT count(*) FROM runs WHERE measures_id = {third['id']} AND status = 'done'") == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_submit_starts_new_lora_on_merged_policy(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    published(worker, base, tmp_path / "out", KINDS[kind])
    words = ("submit", *SMALL, "--model", "first@1", "--lora", "new", "--lora-r", "2")
    plan = json.loads(agentrl(capsys, *words, "--dry-run", "--json")[0])
    assert plan["from"] == "first@1, merged"
    assert not settings().models_dir.exists(), "nothing is written"
    said = agentrl(capsys, *words, "--name", "second")[1]
    assert "Merging first@1 into" in said
    do_jobs()
    row = run_names.find_run(worker, "second")
    assert (row["status"], row["base"]) == ("done", str(settings().models_dir / "first-v1"))
    assert row["manifest"]["from"] == {"run": "first", "version": 1, "lora": "new"}
    trained = value(worker, f"SELECT path FROM policies WHERE run_id = {row['id']} AND version = 1")
    assert weights(trained)["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == 2
    assert "Merging" not in agentrl(capsys, *words, "--name", "other")[1], "it is there already"


def test_submit_notices_replaced_base_before_start(
    worker: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tiny_random(tmp_path / "own")
    published(worker, own, tmp_path / "out", KINDS["all weights"])
    file = own / "config.json"
    file.write_text(file.read_text() + " ")
    for words in (("submit", *SMALL, "--model", "first@1"), ("resume", "first", "--iterations", "1")):
        assert "has changed since these weights were trained on it" in agentrl(capsys, *words, code=8)[1]


def test_submit_refuses_option_that_conflicts_with_policy(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(worker, base, tmp_path / "out", KINDS["lora"])
    words = ("submit", *SMALL, "--model", "first@1", "-s", "model.sampler_dtype=bfloat16")
    assert "Invalid config: model: sampler_dtype has no effect with LoRA" in agentrl(capsys, *words, code=2)[1]


@pytest.mark.slow
def test_model_option_takes_run_name_unless_a_model_has_it(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(worker, base, tmp_path / "out", KINDS["all weights"], versions=2, epochs=2)
    words = ("submit", *SMALL, "--dry-run", "--json", "--model", "first")
    assert json.loads(agentrl(capsys, *words)[0])["from"] == "first@2"
    tiny_random(settings().models_dir / "first")
    assert "from" not in json.loads(agentrl(capsys, *words)[0])


@pytest.mark.slow
def test_model_option_takes_checkpoint_path(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made,) = published(worker, base, tmp_path / "out", KINDS["all weights"])
    link_epochs(epoch_ends.load_epoch_ends(worker, 1))
    for path in (made, tmp_path / "out" / "epoch_1"):
        plan = json.loads(agentrl(capsys, "submit", *SMALL, "--model", str(path), "--dry-run", "--json")[0])
        assert (plan["from"], plan["model"]) == ("first@1", str(base))
        assert plan["config"]["model"]["path"] == "first@1"


@pytest.mark.slow
def test_continued_policy_options_cannot_be_changed(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(worker, base, tmp_path / "out", KINDS["lora"])
    start = ("submit", *SMALL, "--dry-run", "--model", "first@1")
    refused = [
        (("--lora-r", "8"), 2, "model.lora_r=4. "),
        (("-s", "model.lora_alpha=32"), 2, "model.lora_alpha=8.0"),
        (("--load-in-4bit",), 2, "model.load_in_4bit=False"),
        (("--lora", "other"), 2, "model.lora"),
        (("--model", "first@9"), 5, "no policy version 9"),
        (("--model", "first@epoch2"), 5, "has not ended"),
        (("--model", "nobody@1"), 5, "There is no run 'nobody'"),
        (("--model", "a" * 5000), 5, "No run or model is called"),
        (("--model", str(base), "--lora", "new"), 2, "--lora new requires a run's policy"),
    ]
    for words, code, said in refused:
        assert said.strip() in agentrl(capsys, *start, *words, code=code)[1], words
    agentrl(capsys, *start, "--lora-r", "4", "-s", "model.lora_dropout=0.1")


def test_sft_continues_or_restarts_on_merged_policy(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(worker, base, tmp_path / "out", KINDS["lora"])
    words = ["sft", "--dataset", "arithmetic", "--steps", "1", "--batch-size", "2", "--learning-rate", "1e-9"]
    agentrl(capsys, *words, "--model", "first@1", "--name", "on")
    said = agentrl(capsys, *words, "--model", "first@1", "--lora", "new", "--lora-r", "2", "--name", "anew")[1]
    assert "Merging first@1" in said
    assert "trainable params" in said
    agentrl(capsys, "merge", "first@1", "--out", str(tmp_path / "merged"))
    merged, on, anew = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "merged", settings().models_dir / "on", settings().models_dir / "anew")
    )
    for made in (on, anew):
        assert max(float((made[name] - merged[name]).abs().max()) for name in merged) < 1e-6
    assert "which has its own" in agentrl(capsys, *words, "--model", "first@1", "--lora-r", "2", code=2)[1]
    assert "requires a run's policy" in agentrl(capsys, *words, "--model", str(base), "--lora", "new", code=2)[1]


@quantised
def test_submit_dequantises_4_bit_policy_before_new_lora(
    worker: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(worker, base, tmp_path / "out", {"load_in_4bit": True, "lora_r": 4})
    said = agentrl(capsys, "submit", *SMALL, "--model", "first@1", "--lora", "new", "--name", "second")[1]
    assert "The base was dequantised" in said
    do_jobs()
    assert run_names.find_run(worker, "second")["status"] == "done"
