"""TensorBoard: event files in a folder for each run, written without TensorFlow."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.workflow.trackers import EVALUATION, ITERATION, SAMPLES, TrackedRun, TrackedStep, Tracker


class _Session:
    """A session that adds a new event file to the run's folder."""

    def __init__(self, run: TrackedRun, handle: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(handle) if handle else run.folder / "tensorboard" / run.name
        self.handle, self.url = str(folder), f"tensorboard --logdir {folder.parent}"
        self._known = _read_last_numbers(folder)
        self._writer = EventFileWriter(str(folder))
        if not self._known:  # also where the files of an earlier session are gone
            rows = "\n".join(f"| `{key}` | `{value}` |" for key, value in run.config.items())
            tags = f"Tags: {', '.join(run.tags)}\n\n" if run.tags else ""
            self._add(0, 0.0, [_text("run", f"[{run.name}]({run.page})\n\n{tags}| key | value |\n|---|---|\n{rows}")])

    def last_numbers(self) -> Mapping[str, int]:
        return self._known

    def log(self, step: TrackedStep) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in step.numbers.items()]
        values += [_text(SAMPLES, step.text)] if step.text else []
        self._add(step.number, step.at.timestamp(), values)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()

    def _add(self, step: int, seconds: float, values: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=values)))


def _text(tag: str, text: str) -> Any:
    """Return a summary value that TensorBoard's text plugin shows as Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode(errors="replace")], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _read_last_numbers(folder: Path) -> dict[str, int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.is_dir():
        return {}
    events = EventAccumulator(str(folder), size_guidance={"tensors": 1, "scalars": 0})
    events.Reload()
    present = set(events.Tags()["scalars"])
    return {
        series: max(event.step for event in events.Scalars(series)) for series in (ITERATION, EVALUATION) if series in present
    }


tensorboard = Tracker("tensorboard", _Session)
