"""Datasets of the hub by name: the client is real, the hub is a local server."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
READ = """
import json, sys
from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.errors import AgentRLError
for name, split in json.loads(sys.argv[1]):
    try:
        tasks = load_tasks(DatasetConfig(name=name, split=split, map="question=problem")).tasks
        print(json.dumps([[task.key, task.messages[0].content, task.reference] for task in tasks]))
    except AgentRLError as error:
        print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does about `someone/NAME` for each folder of that name; `someone/closed` may not be seen."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        match = re.fullmatch(r"(?:/api)?/datasets/someone/(\w+)(?:/(resolve|tree|revision)/[^/]+/?(.*))?", path)
        here = self.folder / match[1] if match else self.folder / "absent"
        if match is None or not here.is_dir():
            closed = match is not None and match[1] == "closed"
            self.answer(403 if closed else 404, b"{}", **{"X-Error-Code": "GatedRepo" if closed else "RepoNotFound"})
        elif match[2] == "resolve" and (here / match[3]).is_file():
            data = (here / match[3]).read_bytes()
            ends = re.findall(r"\d+", self.headers.get("range") or f"0-{len(data)}")
            self.answer(206 if "range" in self.headers else 200, data[int(ends[0]) : int(ends[1]) + 1])
        elif match[2] == "tree" and not match[3]:
            files = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "1"} for file in here.iterdir()]
            self.answer(200, json.dumps(files).encode())
        elif match[2] in (None, "revision"):
            names = [{"rfilename": file.name} for file in here.iterdir()]
            about = {"id": f"someone/{match[1]}", "sha": "0" * 40, "siblings": names, "tags": [], "private": False}
            self.answer(200, json.dumps(about | {"downloads": 0, "likes": 0}).encode())
        else:
            self.answer(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

    def answer(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in ({"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served_datasets(folder: Path) -> Iterator[str]:
    """The address of a hub with the datasets in the folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("HubOfFolder", (Hub,), {"folder": folder})) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_hub_dataset_is_read_by_name_without_its_code(tmp_path: Path) -> None:
    for name in ("rows", "scripted"):
        (tmp_path / name).mkdir()
    for split, number in (("train", 1), ("test", 2)):
        row = {"problem": f"{number}+1?", "answer": str(number + 1)}
        (tmp_path / "rows" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit('it was run')")
    asked = [
        ("rows", "train"),
        ("rows", "test"),
        ("rows", "tset"),
        ("scripted", "train"),
        ("closed", "train"),
        ("none", "train"),
    ]
    with served_datasets(tmp_path) as address:
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", READ, json.dumps([(f"someone/{name}", split) for name, split in asked])],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
    train, test, split, scripted, closed, none = map(json.loads, done.stdout.splitlines())
    assert train == [["someone/rows/train/1", "1+1?", "2"]]
    assert test == [["someone/rows/test/1", "2+1?", "3"]]
    assert split.startswith("'someone/rows' has no split 'tset'")
    assert scripted.startswith("The dataset 'someone/scripted' needs its own code, which is not run.")
    assert closed.startswith(
        "There is no folder 'someone/closed' here, and the hub has no such dataset, or you may not see it."
    )
    assert none.startswith("There is no folder 'someone/none' here, and the hub has no such dataset")
