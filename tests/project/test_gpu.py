"""The check for a GPU, its CPU half: with the packages that are installed here, but no script of theirs on the path."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import kept, summary, wheels
from bench.gpu.__main__ import GRACE

ROOT = Path(__file__).parents[2]
SECONDS = 200
"""For a part; with the grace that it gets and what comes before it, less than `check` waits."""
MACHINE = {"device": "cpu", "python": "3.12", "cores": 2, "system": "here", "versions": {}}


def check(folder: Path, *asked: str) -> tuple[int, str]:
    """The exit code and what was printed, in an environment with neither our scripts nor a home."""
    command = [sys.executable, "-m", "bench.gpu", *asked, "--out", str(folder)]
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", ["float32", "bfloat16", "logprobs", "memory", "decode"])
def test_each_part_runs_without_a_gpu_and_says_that_it_does(part: str, tmp_path: Path) -> None:
    code, said = check(tmp_path, part, "--seconds", str(SECONDS))
    assert code == 0, said
    assert said.startswith("no GPU: the CPU half")
    found = json.loads((tmp_path / f"{part}.json").read_text())
    assert found["ended"] == "yes"
    assert found["rows"]
    assert not found["missing"]
    assert f"## {part}" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_what_there_is_no_time_for_is_said_row_by_row(tmp_path: Path) -> None:
    code, said = check(tmp_path, "memory", "--seconds", "20")
    found = json.loads((tmp_path / "memory.json").read_text())
    assert code == 0, said
    assert found["rows"] == []
    assert [missed["name"] for missed in found["missing"]] == ["4 bits, checkpointing", "bfloat16, as it comes"]


@pytest.mark.slow
def test_a_part_that_does_not_end_is_killed_and_says_so(tmp_path: Path) -> None:
    code, said = check(tmp_path, "decode", "--seconds", str(0.1 - GRACE))
    assert code == 1
    assert "decode: broke off: its time was over" in said
    assert json.loads((tmp_path / "decode.json").read_text())["ended"] == "its time was over"


def test_an_unknown_part_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    code, said = check(tmp_path, "speed")
    assert code == 1
    assert "There is no part 'speed'; there are: float32, bfloat16, logprobs, memory, decode." in said


def test_a_row_that_cannot_be_made_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("the device\nis gone")

    part = kept.Part("decode", tmp_path, MACHINE, seconds=60)
    part.attempt("first", broken)
    assert json.loads((tmp_path / "decode.json").read_text())["rows"] == [
        {"name": "first", "failed": "RuntimeError: the device is gone"}
    ]
    part.attempt("second", lambda: {"rate": 2.0})
    part.attempt("third", lambda: {"rate": 3.0}, seconds=100)
    assert part.failed
    kept.keep(tmp_path / "machine.json", MACHINE)
    told = summary.write(tmp_path).read_text()
    assert "first FAILED: RuntimeError" in told
    assert "| second | 2 |" in told
    assert "not measured: third: 60 s were left" in told
    assert "broke off: no" in told


def test_a_machine_unpacks_the_wheels_that_it_lacks_and_no_others(tmp_path: Path) -> None:
    for name, version in (("carried_along", "1.0"), ("pytest", pytest.__version__)):
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: here\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    site = wheels.unpacked(tmp_path)
    assert site is not None
    assert [file.name for file in site.glob("*.py")] == ["carried_along.py"]


def test_wheels_are_fetched_in_the_order_of_need_while_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"pydantic": 2, "jinja2": 3, "pytest": 1, "packaging": 0}

    def downloaded(folder: Path, wanted: str, python: str) -> Path | None:
        name, version = wanted.split("==")
        file = folder / f"{name}-{version}-py3-none-any.whl"
        if not sizes[name]:
            return None
        file.write_bytes(bytes(sizes[name] * wheels.MIB))
        return file

    monkeypatch.setattr(wheels, "WANTED", tuple(sizes))
    monkeypatch.setattr(wheels, "_downloaded", downloaded)
    (tmp_path / "of_an_older_call-1.0-py3-none-any.whl").touch()
    assert wheels.fetch(tmp_path, 3.0, "3.12") == 0
    said = capsys.readouterr().out
    assert "2 wheels, 3.0 of 3 MiB" in said
    assert "Not in it: jinja2 (3.0 MiB), packaging (no such wheel)." in said
    assert sorted(file.name.split("-")[0] for file in tmp_path.glob("*.whl")) == ["pydantic", "pytest"]
