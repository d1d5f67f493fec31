"""What the manual shows of training and of a store in Python, run as it is shown."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.documents import DOCS, ROOT, between
from tests.support.real_stack import SMALL, embedded_stack
from tests.support.small_models import tiny_calling

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]


def test_the_shown_code_reads_a_real_run_samples_from_its_policy_and_saves_it(short_folder: Path, tmp_path: Path) -> None:
    model = tiny_calling(tmp_path / "tiny", layers=4, width=128)
    with embedded_stack(short_folder, idle_seconds="3600") as stack:
        run = stack.agentrl(
            "submit", "--dataset", "arithmetic", "--model", str(model), "--max-tasks", "16", *SMALL, "--wait"
        ).strip()
        (code,) = between(DOCS / "how-to.md", "read a store", "python")
        said = _run(code, stack.environment, tmp_path)
        assert f"<run {run}: done" in said
        assert f"<curve of {run}: " in said
        assert (tmp_path / "a-model" / "model.safetensors").is_file()


def test_the_shown_code_trains_on_rows_with_a_function_of_its_own(short_folder: Path, tmp_path: Path) -> None:
    (manual,) = between(DOCS / "how-to.md", "train from python", "python")
    readme = f"import agentrl\n{(ROOT / 'README.md').read_text().split('import agentrl')[1].split('```')[0]}"
    *lines, shown = readme.replace("epochs=3", "epochs=1").rstrip().splitlines()
    models = short_folder / "home" / "models"
    models.mkdir(parents=True)
    tiny_calling(tmp_path / "tiny", layers=4, width=128).rename(models / "tiny-arithmetic")
    with embedded_stack(short_folder, idle_seconds="3600") as stack:
        (by_hand,) = between(DOCS / "how-to.md", "by hand", "python")
        for code in (f"{manual}\n{by_hand}", "\n".join([*lines, f"print({shown})"])):
            said = _run(code, stack.environment, tmp_path)
            assert ": done after" in said
            assert "<curve of train-" in said
        assert "Message(role='assistant'" in said


def _run(code: str, environment: dict[str, str], folder: Path) -> str:
    """What the script prints."""
    (folder / "shown.py").write_text(code)
    command = [sys.executable, "shown.py"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
