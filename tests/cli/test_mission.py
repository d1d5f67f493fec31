"""SFT, RL and a chat, one after the other, typed as people who come from smaller frameworks type them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.data.test_datasets import published_gsm8k as published_gsm8k
from tests.support.real_stack import Stack, embedded_stack

ROWS = {"train": 20, "test": 4}


@pytest.fixture
def small_gsm8k(published_gsm8k: Path, module_folder: Path) -> Path:
    """The first rows of the published files."""
    folder = module_folder / "gsm8k"
    folder.mkdir(exist_ok=True)
    for split, most in ROWS.items():
        with (published_gsm8k / f"{split}.jsonl").open() as file:
            (folder / f"{split}.jsonl").write_text("".join(islice(file, most)))
    return folder


@pytest.fixture(scope="module")
def stack(module_folder: Path) -> Iterator[Stack]:
    """The embedded stack, started by the first submit, with `small_gsm8k`."""
    with embedded_stack(module_folder, "3600") as made:
        made.environment["AGENTRL_GSM8K_DIR"] = str(module_folder / "gsm8k")
        yield made


def struck(stack: Stack, words: list[str], after: str) -> None:
    """Ends the command with kill -9 once it has said that."""
    command = [sys.executable, "-m", "agentrl.cli", *words]
    process = subprocess.Popen(command, env=stack.environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any(line.startswith(after) for line in process.stderr)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def talked(stack: Stack, words: list[str]) -> str:
    """What a chat in a pipe answers to one question."""
    command = [sys.executable, "-m", "agentrl.cli", *words]
    told = subprocess.run(
        command, env=stack.environment, input="What is 2 plus 2?\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.mark.slow
def test_mission_runs_sft_with_kill_then_rl_then_chat(stack: Stack, small_gsm8k: Path, tmp_path: Path) -> None:
    """SFT is killed once on the way, and typed again."""
    outputs = tmp_path / "outputs"
    learn = [
        *("sft", "--model_path", "tiny", "--dataset", "gsm8k", "--num_epochs", "2", "--max_samples", "10"),
        *("--batch_size", "2", "--gradient_accumulation_steps", "2", "--save_every", "2", "--output_dir", str(outputs / "sft")),
    ]
    struck(stack, learn, "step 3/")
    assert not (outputs / "sft").exists()
    assert stack.agentrl(*learn) == f"{outputs / 'sft'}\n"
    reinforce = [
        *("submit", "--model_path", str(outputs / "sft"), "--dataset", "gsm8k", "--samples_per_prompt", "4"),
        *("--max_samples", "5", "--max_new_tokens", "24", "--max_steps", "2", "--total_epochs", "2", "--batch_size", "8"),
        *("--gradient_accumulation_steps", "2", "--output_dir", str(outputs / "rl")),
        *("--hook", "tests.support.parity_hook:Lucky"),
    ]
    run = stack.agentrl(*reinforce, "--wait").strip()
    last = outputs / "rl" / "epoch_2"
    assert last.is_dir()
    assert [listed["status"] for listed in json.loads(stack.agentrl("runs", "--json")) if listed["run"] == run] == ["done"]
    ask = ["chat", "--model_path", str(last), "--max_new_tokens", "12", "--temperature", "0.7"]
    assert talked(stack, ask).strip()
