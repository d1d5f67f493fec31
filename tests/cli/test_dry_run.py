"""`submit --dry-run`: the size and memory of a model first, then the checks, each with its time; the hub is real but local."""

import json
import math
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from agentrl.cli.main import main
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.lookup import HUB_HINT
from agentrl.workflow.models.parameters import count_in_files
from agentrl.workflow.runtime import hub
from tests.cli.test_cli import process
from tests.support.families import FAMILIES, save_random
from tests.support.small_models import tiny_random

NAME = "someone/small"


@contextmanager
def served_hub(folder: Path) -> Iterator[str]:
    """A server that answers as the hub does about the one model in `folder`; the address."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            file = folder / path.rpartition("/")[2]
            if path == f"/api/models/{NAME}":
                about = {"id": NAME, "sha": "0" * 40, "siblings": [], "tags": [], "private": False}
                self.answer(200, json.dumps(about).encode())
            elif path.startswith(f"/{NAME}/resolve/main/") and file.is_file():
                data = file.read_bytes()
                first, last = re.findall(r"\d+", self.headers.get("range") or f"0-{len(data)}")
                self.answer(206 if "range" in self.headers else 200, data[int(first) : int(last) + 1])
            else:
                self.answer(404, b"{}", **{"X-Error-Code": "EntryNotFound" if NAME in path else "RepoNotFound"})

        def answer(self, code: int, data: bytes, **headers: str) -> None:
            self.send_response(code)
            for name, value in ({"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def dry_run(home: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    command = ["-m", "agentrl.cli", "submit", *words, "--dry-run"]
    done = process(command, home, HF_HOME=str(home / "hub"), AGENTRL_GSM8K_DIR="", **environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("forked_programs")
def test_dry_run_shows_size_and_memory_before_checks(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_random(tmp_path / "model")
    assert main(["submit", "--dataset", "arithmetic", "--model", str(folder), "--lora-r", "4", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^tool_format +hermes$", shown.out, re.MULTILINE)
    first, on_gpu, on_cpu, *checks = shown.err.splitlines()
    assert first == str(count_in_files(ModelConfig(path=str(folder), lora_r=4), folder))
    assert re.fullmatch(r"memory on a GPU: \d+\.\d GiB: model \d.* 0.5 to 1 GiB more", on_gpu)
    assert re.fullmatch(
        r"memory on a CPU: \d+\.\d GiB: model \d\.\d, plus the larger of sampling 128 x 1,024 tokens \d\.\d, update \d\.\d",
        on_cpu,
    )
    names = [re.sub(r" +\d+\.\d s$", "", line).removeprefix("checked ") for line in checks if line.startswith("checked ")]
    assert names == [
        "dataset",
        "tools and rewards",
        "references",
        "model and its hash",
        "chat template",
        "model files",
        "optimizer",
        "workers",
    ]
    assert not home.exists()
    asked = ["submit", "--dataset", "arithmetic", "--model", str(folder), "-s", "update.devices=64", "--dry-run"]
    assert main(asked) == 2
    assert "update.devices=64 needs 64 GPUs, and torch can use " in capsys.readouterr().err


@pytest.mark.usefixtures("forked_programs", "home")
@pytest.mark.parametrize("wrong", [("--reward", "nowhere:right"), ("--agent", "nowhere:solve")])
def test_submit_prints_no_size_before_a_wrong_part(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: tuple[str, str]
) -> None:
    folder = tiny_random(tmp_path / "model")
    assert main(["submit", "--dataset", "arithmetic", "--model", str(folder), *wrong, "--detach"]) == 2
    shown = capsys.readouterr().err
    assert "nowhere" in shown
    assert "parameters" not in shown
    assert "memory on" not in shown


def test_dry_run_probe_samples_one_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_random(tmp_path / "model", FAMILIES["Qwen3.5"]())
    asked = ["submit", "--dataset", "arithmetic", "--model", str(folder), "--lora-r", "4", "--probe"]
    assert main([*asked, "--dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert "checked one token" in shown.err
    assert plan["sampler"] == "transformers' forward pass"
    assert plan["lora_layers"].startswith("out_proj x 1, in_proj_qkv x 1")
    assert plan["lora_trains"] == "4,512 of 47,328 parameters"
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * math.nan for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert main([*asked, "--dry-run"]) == 8
    assert "The model returned NaN instead of logits." in capsys.readouterr().err
    assert main(asked) == 2
    assert "--probe requires --dry-run." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_dry_run_reads_size_of_hub_model_without_download(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    with served_hub(folder) as address:
        code, _, told = dry_run(tmp_path / "home", "--dataset", "arithmetic", "--model", NAME, HF_ENDPOINT=address)
        assert (code, told.splitlines()[0]) == (0, str(count_in_files(ModelConfig(path=str(folder)), folder)))
        assert not list((tmp_path / "home").rglob("*.safetensors"))
        assert not list((tmp_path / "home").rglob("config.json"))
        code, _, told = dry_run(tmp_path / "home", "--dataset", "arithmetic", "--model", "someone/else", HF_ENDPOINT=address)
        assert (code, "There is no model 'someone/else', here or on the hub." in told) == (8, True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_dry_run_without_hub_reports_faults_of_data_and_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, out, told = dry_run(tmp_path / "home", "--dataset", "gsm8k", "--model", NAME, HF_ENDPOINT=address)
    assert (code, out) == (2, "")
    assert told.splitlines() == [
        "agentrl: The request has 2 errors:",
        "  gsm8k cannot be loaded: There is no folder 'openai/gsm8k' here, and the hub does not answer. Set AGENTRL_GSM8K_DIR "
        "to the folder that holds train.jsonl and test.jsonl.",
        f"  Cannot reach the hub for {NAME!r}. {HUB_HINT}",
    ]


def test_hub_without_answer_is_not_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hub, "_silent_since", -hub.AWAY_SECONDS)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: asked.append(1) or 1 / 0)
    assert [hub.ask_hub("model", NAME), hub.ask_hub("dataset", NAME)] == ["away", "away"]
    assert asked == [1]


def test_hub_lookup_times_out_with_silent_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.05)
    with socket.socket() as endless:
        endless.bind(("127.0.0.1", 0))
        endless.listen()
        assert hub.answer_in_time(lambda: endless.accept()) is None
