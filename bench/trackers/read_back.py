"""What each tracker has of a run, read by the tracker's own package: metric -> [(step, value), ...] in the order of writing."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

Points = dict[str, list[tuple[int, float]]]


def read_tensorboard(handle: str, home: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(handle, size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_mlflow(handle: str, home: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'trackers' / 'mlflow.db'}")
    metrics = client.get_run(handle).data.metrics
    return {name: [(point.step, point.value) for point in client.get_metric_history(handle, name)] for name in metrics}


def read_trackio(handle: str, home: Path) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    points: Points = defaultdict(list)
    for row in SQLiteStorage.get_logs("agentrl", handle):
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "timestamp"):
                points[name].append((int(row["step"]), value))
    return points


def read_wandb(handle: str, home: Path) -> Points:
    """The history in the offline files; a step is what the metric's x axis says."""
    from wandb.proto.wandb_internal_pb2 import Record

    from agentrl.workflow.trackers.wandb import _read_chunks

    points: Points = defaultdict(list)
    for file in sorted((home / "trackers" / "wandb").glob(f"offline-run-*-{handle}/*.wandb")):
        for data in _read_chunks(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.get("eval/version", row.get("iteration", 0))
            for name, value in row.items():
                if isinstance(value, int | float) and not name.startswith("_"):
                    points[name].append((int(step), value))
    return points


READERS: Mapping[str, Callable[[str, Path], Points]] = {
    "tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio, "wandb": read_wandb,
}  # fmt: skip
