"""`make gpu-check` without a GPU: its three calls, with the installed packages but none of our scripts on the path."""

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.faults.fork_server import FORKED, Nursery
from bench.gpu import __main__ as program
from bench.gpu import machine, memory, model_file, part, prepare, shapes, summary, wheels
from bench.performance.memory import PLANS
from tests.support.gguf_file import write_gguf

ROOT = Path(__file__).parents[2]
MACHINE = {"device": "cpu", "python": "3.12", "cores": 2, "system": "here", "versions": {}}


def run_check(folder: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and what was printed, in an environment with neither our scripts nor a home."""
    command = [sys.executable, "-m", "bench.gpu", *words, "--out", str(folder / "out"), "--files", str(folder)]
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False, timeout=560)
    return done.returncode, done.stdout + done.stderr


def results(folder: Path, name: str) -> Any:
    return json.loads((folder / "out" / f"{name}.json").read_text())


def carry(folder: Path, file: Path) -> None:
    """The two pieces of a model file, each in its call's folder."""
    folders = [folder / "gpu-2", folder / "gpu-3"]
    for each in folders:
        each.mkdir()
    model_file.split(file, folders, [file.stat().st_size // 2])


@pytest.fixture
def forked_parts(forks: Nursery) -> Iterator[None]:
    """Fork the calls, their parts, and the stacks that parts start."""
    server = replace(forks.server, forked_by_children=(*FORKED, "bench.gpu", "bench.gpu.machine"))
    with replace(forks, server=server).forking_programs():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("call", ["1", "2", "3"])
def test_gpu_check_measures_every_part_of_a_call(call: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if call != "1":  # that call shows that a bare interpreter suffices, and measures memory
        request.getfixturevalue("forked_parts")
    write_gguf(tmp_path / "random.gguf")
    carry(tmp_path, tmp_path / "random.gguf")
    code, output = run_check(tmp_path, call)
    assert code == 0, output
    assert output.startswith("no GPU: the CPU half")
    for name in (name for name, spec in program.PARTS.items() if str(spec.call) == call):
        measured = results(tmp_path, name)
        assert (measured["ended"], measured["missing"]) == ("yes", []), output
        assert measured["rows"]
        assert f"## {name}" in (tmp_path / "out" / "summary.md").read_text()
    if call == "2":
        (run,) = results(tmp_path, "device_lost")["rows"]
        assert (run["status"], run["processes"], run["failures"]) == ("done", 2, 0)  # another process, and no attempt spent
    if call == "3":
        (run,) = [row for row in results(tmp_path, "learn_smollm")["rows"] if row["name"] == "run"]
        assert run["iterations"] == 10
        assert run["last"] > run["first"]


def test_gpu_check_names_the_parts_without_time(tmp_path: Path) -> None:
    code, output = run_check(tmp_path, "decode,faults", "--seconds", "0")
    assert code == 1
    for name in ("decode", "faults"):
        assert f"{name}: not complete: no time was left of 0 s" in output
        assert results(tmp_path, name)["ended"] == "no time was left of 0 s"
    assert "not complete: no time was left" in (tmp_path / "out" / "summary.md").read_text()


def test_gpu_check_refuses_an_unknown_part(tmp_path: Path) -> None:
    code, output = run_check(tmp_path, "speed")
    assert code == 1
    assert f"Unknown part 'speed'. Calls: 1, 2, 3. Parts: {', '.join(program.PARTS)}." in output


def arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(out=str(folder), files=str(folder / "nothing"), seconds=480.0)


def facts(**versions: str) -> dict[str, Any]:
    here = {name: {"here": versions.get(name, "1.0"), "ours": "1.0"} for name in (*machine.SHOWN, *machine.OTHERS)}
    return {**MACHINE, "versions": here}


def test_gpu_check_kills_a_part_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "GRACE_SECONDS", 0.1)
    part.write_json(tmp_path / "machine.json", facts())
    assert not program._run("decode", arguments(tmp_path), facts(), [], 0.1, 0.0)
    assert "decode: not complete: its time was over" in capsys.readouterr().out
    assert json.loads((tmp_path / "decode.json").read_text())["ended"] == "its time was over"


def test_gpu_check_names_the_packages_that_a_part_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not program._run("learn_smollm", arguments(tmp_path), facts(celery="", gguf=""), [], 480.0, 0.0)
    assert "learn_smollm: not complete: missing packages: celery, gguf. Copy the folders" in capsys.readouterr().out


def test_gpu_check_knows_version_of_every_needed_package() -> None:
    known = {*machine.SHOWN, *machine.OTHERS}
    assert {package for spec in program.PARTS.values() for package in spec.needs} <= known
    assert {spec.call for spec in program.PARTS.values()} == {1, 2, 3}
    for call in (1, 2, 3):
        assert sum(spec.seconds for spec in program.PARTS.values() if spec.call == call) <= program.CALL_SECONDS


def test_gpu_part_reports_failed_row_and_continues(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("the device\nis gone")

    rows = part.Part("decode", tmp_path, MACHINE, 60, tmp_path)
    rows.attempt("first", broken)
    assert json.loads((tmp_path / "decode.json").read_text())["rows"] == [
        {"name": "first", "failed": "RuntimeError: the device is gone"}
    ]
    rows.attempt("second", lambda: {"rate": 2.0})
    rows.attempt("third", lambda: {"rate": 3.0}, seconds=100)
    assert rows.failed
    part.write_json(tmp_path / "machine.json", MACHINE)
    text = summary.write(tmp_path).read_text()
    assert "first FAILED: RuntimeError" in text
    assert "| second | 2 |" in text
    assert "not measured: third: 60 s were left" in text
    assert "not complete: no" in text


def test_gpu_unpack_installs_only_missing_wheels(tmp_path: Path) -> None:
    folder = tmp_path / "gpu-1"
    folder.mkdir()
    for name, version in (("carried_along", "1.0"), ("pytest", pytest.__version__)):
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: here\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    (site,) = wheels.unpack_all(tmp_path)
    assert [file.name for file in site.glob("*.py")] == ["carried_along.py"]


def test_gpu_stack_wheels_follow_from_pyproject() -> None:
    names = prepare.resolve(prepare.stack_requirements(), "3.12")
    declared = {Requirement(text).name for text in prepare.stack_requirements()}
    assert declared - prepare.MACHINE - prepare.UNUSED <= set(names)
    assert {"vine", "prompt-toolkit", "mako", "pydantic-core"} <= set(names)  # what those require in turn
    assert not {"torch", "numpy", "datasets", "pyarrow", "pytest"} & set(names)
    assert "async-timeout" not in names  # of Python 3.11.2 and older


def test_gpu_download_omits_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"pydantic": 2, "jinja2": 3, "pytest": 1, "packaging": 0}

    def download_one(folder: Path, requirement: str, python: str) -> Path | None:
        name, version = requirement.split("==")
        file = folder / f"{name}-{version}-py3-none-any.whl"
        if not sizes[name]:
            return None
        file.write_bytes(bytes(sizes[name] * prepare.MIB))
        return file

    monkeypatch.setattr(prepare, "_download_one", download_one)
    left_out = prepare.download(tmp_path, list(sizes), "3.12", 3 * prepare.MIB)
    assert left_out == ["jinja2 (3.0 MiB)", "packaging (no such wheel)"]
    assert sorted(file.name.split("-")[0] for file in tmp_path.glob("*.whl")) == ["pydantic", "pytest"]


def test_gpu_model_file_is_joined_only_if_complete(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(range(256)) * 5)
    carry(tmp_path, file)
    assert model_file.join(tmp_path, tmp_path / "joined").read_bytes() == file.read_bytes()
    piece = tmp_path / "gpu-3" / f"{model_file.PIECE}1"
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + b"?")
    with pytest.raises(ValueError, match="make the pieces again"):
        model_file.join(tmp_path, tmp_path / "joined")
    piece.unlink()
    with pytest.raises(ValueError, match=r"Piece 2 of 2 of model is missing: copy gpu-3\."):
        model_file.join(tmp_path, tmp_path / "joined")
    with pytest.raises(ValueError, match="make gpu-wheels gguf=FILE"):
        model_file.join(tmp_path / "nothing", tmp_path / "joined")


def test_gpu_memory_row_has_peaks_of_every_case() -> None:
    stage = {"gpu_mib": 900.0, "gpu_reserved_mib": 1000.0, "seconds": 1.0}
    stages = {"loading": stage, "sampling": stage, "update": stage | {"gpu_mib": 950.0}}
    value = {"stages": stages, "context_mib": 400.0, "workspaces_mib": 64.0, "microbatch_tokens": 768}
    for case in memory.CASES:
        row = memory._peaks(value, case, {**memory.BASES[case.base], **PLANS[case.plan]})
        assert (row["peak_mib"], row["reserved_mib"], row["with_context_mib"]) == (950.0, 1000.0, 1400.0)
        assert 0 < row["loading_computed_mib"] < row["sampling_computed_mib"] < 2 * case.cap_mib
        assert row["loading_computed_mib"] < row["update_computed_mib"] < 2 * case.cap_mib


def test_gpu_shape_is_made_once_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Qwen2Config(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    monkeypatch.setattr(shapes, "SHAPES", {"small": small})
    rows = part.Part("memory", tmp_path, MACHINE, 60, tmp_path)
    monkeypatch.setattr(shapes, "run", lambda side, timeout: shapes.prepare(**side.arguments)())
    folder = shapes.shape_folder("small", rows)
    assert sorted(file.name for file in folder.parent.iterdir()) == ["small"]
    monkeypatch.setattr(shapes, "run", lambda side, timeout: pytest.fail("it is there already"))
    assert AutoModelForCausalLM.from_pretrained(shapes.shape_folder("small", rows)).dtype == torch.bfloat16
