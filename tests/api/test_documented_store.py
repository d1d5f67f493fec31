"""What the manual shows of a store in Python, run as it is shown on what a real run left."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.documents import DOCS, ROOT, between
from tests.support.real_stack import SMALL, embedded_stack
from tests.support.small_models import tiny_calling

pytestmark = pytest.mark.slow


def test_the_shown_code_reads_a_real_run_samples_from_its_policy_and_saves_it(short_folder: Path, tmp_path: Path) -> None:
    model = tiny_calling(tmp_path / "tiny", layers=4, width=128)
    with embedded_stack(short_folder, idle_seconds="3600") as stack:
        run = stack.agentrl(
            "submit", "--dataset", "arithmetic", "--model", str(model), "--max-samples", "16", *SMALL, "--wait"
        ).strip()
        (code,) = between(DOCS / "how-to.md", "read a store", "python")
        said = _run(code, stack.environment, tmp_path)
        assert f"<run {run}: done" in said
        assert f"<curve of {run}: " in said
        assert (tmp_path / "a-model" / "model.safetensors").is_file()
        shown = (ROOT / "README.md").read_text().split("import agentrl\n")[1].split("```")[0]
        seen = _run(f"import agentrl\n{shown.replace('run.best', 'run.last')}", stack.environment, tmp_path, "-i")
        assert seen.startswith(f"(<curve of {run}: ")
        assert "Message(role='assistant'" in seen


def _run(code: str, environment: dict[str, str], folder: Path, *how: str) -> str:
    """What it prints; with `-i` what a notebook would show of each line, too."""
    command = [sys.executable, "-q", *how] if how else [sys.executable, "-c", code]
    done = subprocess.run(command, input=code if how else None, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout
