"""Weights & Biases: a run of the project in `WANDB_PROJECT`. With `WANDB_MODE=offline` it writes files that `wandb sync`
uploads.
"""

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import count
from pathlib import Path

from agentrl.workflow.trackers import EVALUATION, ITERATION, PROJECT, SAMPLES, TrackedRun, TrackedStep, Tracker


class _Session:
    """A session in W&B."""

    def __init__(self, run: TrackedRun, handle: str) -> None:
        import wandb as package

        self._package = package
        self.handle = handle or blake2b(run.key.encode(), digest_size=8).hexdigest()
        folder = run.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        quiet = package.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = package.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self.handle,
            resume="allow",
            name=run.name,
            dir=str(folder.parent),
            config=dict(run.config),
            tags=[tag[:64] for tag in run.tags],
            notes=run.page,
            settings=quiet,
        )
        self.url = self._run.url or f"wandb sync {folder}/offline-run-*-{self.handle}"
        self._run.define_metric(ITERATION)
        self._run.define_metric(EVALUATION)
        self._run.define_metric("*", step_metric=ITERATION, step_sync=False)
        self._run.define_metric("eval/*", step_metric=EVALUATION, step_sync=False)
        self._known = dict(self._run.summary) if self._run.url else _read_offline(folder, self.handle)

    def last_numbers(self) -> Mapping[str, int]:
        return {series: int(self._known[series]) for series in (ITERATION, EVALUATION) if series in self._known}

    def log(self, step: TrackedStep) -> None:
        text = {SAMPLES: self._package.Html(f"<pre>{_escape(step.text)}</pre>")} if step.text else {}
        self._run.log({**step.numbers, **text})

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _read_offline(folder: Path, handle: str) -> dict[str, float]:
    """Return the last value of each metric in the offline history; summaries are written only at the end."""
    from wandb.proto.wandb_internal_pb2 import Record

    values: dict[str, float] = {}
    for file in sorted(folder.glob(f"offline-run-*-{handle}/run-{handle}.wandb")):
        for data in _read_chunks(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                if name in (ITERATION, EVALUATION):
                    values[name] = float(json.loads(item.value_json))
    return values


def _read_chunks(content: bytes) -> Iterator[bytes]:
    """Yield the records of a `.wandb` file, which is a log in LevelDB's format after a header of 7 bytes."""
    position, record = 7, b""
    for _ in count():
        block_end = (position // 32768 + 1) * 32768
        if block_end - position < 7:  # no room for a chunk's head: the block is padded
            position = block_end
        head = content[position : position + 7]
        if len(head) < 7:
            return
        length, kind = int.from_bytes(head[4:6], "little"), head[6]
        chunk = content[position + 7 : position + 7 + length]
        if kind not in (1, 2, 3, 4) or len(chunk) < length:
            return
        record = chunk if kind in (1, 2) else record + chunk  # 1: whole, 2: first, 3: middle, 4: last
        if kind in (1, 4):
            yield record
        position += 7 + length


wandb = Tracker("wandb", _Session)
