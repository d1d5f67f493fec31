"""Imports traces of other systems as a run of the kind `import`. It reads the turns in the traces, and counts the traces that
are left out, by reason.
"""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from agentrl.workers.requests.serve_request import recorded_submission, serve_config
from agentrl.workflow.adapters import Adapter, Turn
from agentrl.workflow.annotations import MAX_NAME, MAX_OF_ATTEMPT, Annotation, rewards_of
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.templates import resolve_chat
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import DatasetError, ModelError
from agentrl.workflow.inference.traced_steps import traced_steps
from agentrl.workflow.models.loading import context_and_vocabulary, load_chat
from agentrl.workflow.models.lookup import model_folder, starting_policy
from agentrl.workflow.plugins import find, names
from agentrl.workflow.spans import Span, span_names
from agentrl.workflow.spans.span_annotations import annotations_of_span
from agentrl.workflow.spans.traces import Trace, traces_of
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.imported_runs import EXACT, ImportedEpisode
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.trajectory import PolicyRef, StepRecord, StopReason, Task

MAX_TURNS = 1000
MAX_EPISODES = 100_000
MAX_DEPTH = 64
"""The number of ancestors of a span, counted upward, that are searched for another span of the same model call."""


@dataclass(frozen=True)
class PreparedImport:
    """A checked import that can be written.

    Args:
        exact: whether all token ids and logprobs are those of the sampler.
        without: the number of episodes in which at least one turn has no token ids or no logprobs.
        left_out: the number of traces that were left out, by reason.
    """

    submission: Submission
    episodes: Sequence[ImportedEpisode]
    exact: bool
    without: int
    left_out: Mapping[str, int]


@dataclass
class _Read:
    """The parsed content of a trace: turns and annotations, each paired with its span."""

    trace: Trace
    turns: list[tuple[Span, Turn]] = field(default_factory=list)
    annotations: list[tuple[Span, Annotation]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return all(turn.exact for _, turn in self.turns)

    def keep_once(self) -> None:
        """Keep one span for each model call."""
        parents = {(span.trace_id, span.span_id): span.parent_id for span in self.trace.spans}
        turns = {(span.trace_id, span.span_id): turn for span, turn in self.turns}
        for span, turn in self.turns:
            inner, above, depth = (span.trace_id, span.span_id), parents[span.trace_id, span.span_id], 0
            while above and depth < MAX_DEPTH and inner in turns:
                outer, depth = (span.trace_id, above), depth + 1
                if outer in turns and _is_one_call(turns[outer], turn):
                    del turns[inner if turns[outer].exact and not turn.exact else outer]
                above = parents.get(outer, "")
        beside = [span for span, _ in self.turns if (span.trace_id, span.span_id) not in turns]
        self.turns = [(span, turn) for span, turn in self.turns if (span.trace_id, span.span_id) in turns]
        self.annotations += [(span, _in_short(span, "another span has the same turn")) for span in beside]


def prepare_import(
    db: Database | None,
    spans: Sequence[Span],
    config: RunConfig,
    ref: PolicyRef | None,
    adapters: Sequence[str] = (),
    name: str | None = None,
    exact_only: bool = False,
) -> PreparedImport:
    """Read the traces and build the import. Nothing is written. Raise ConfigError if an adapter does not exist. Raise
    ModelError if the model is not on this machine, has no usable chat template, or did not sample these tokens. Raise
    DatasetError if no trace is left to import, or there are too many episodes.

    Args:
        db: the database in which a free name is looked up; None if it does not exist yet.
        config: the config whose model sampled the turns, or whose chat template renders them.
        ref: the policy that sampled the turns; None for the model in `config`.
        exact_only: True to leave out traces in which a turn has no token ids or no logprobs.
    """
    readers: list[Adapter] = [find("adapters", adapter) for adapter in adapters or names("adapters")]
    left_out: Counter[str] = Counter()
    read = [trace_turns for trace in traces_of(spans) if (trace_turns := _read(trace, readers, left_out)) is not None]
    without = sum(not read_trace.exact for read_trace in read)
    if exact_only:
        left_out["turns without token ids or logprobs"] += without
        read = [read_trace for read_trace in read if read_trace.exact]
    if not read:
        raise _nothing(left_out)
    if len(read) > MAX_EPISODES:
        raise DatasetError(f"There are more than {MAX_EPISODES} episodes.", "Split the file, and import the parts.")
    ref = ref or starting_policy(config.model.path, config.dataset.name)
    folder = model_folder(ref.base, config.model.trust_remote_code)
    settled = build(serve_config(config, name, {}).flat())
    settled = settled.model_copy(update={"model": resolve_chat(settled.model, folder)})
    chat = load_chat(settled.model, folder)
    _, vocabulary = context_and_vocabulary(folder, settled.model.trust_remote_code)
    exact = exact_only or not without
    weights = _weights(read)
    episodes = list(_episodes(read, chat, vocabulary, exact, weights, left_out))
    if not episodes:
        raise _nothing(left_out)
    if exact:
        _check_spelling(episodes, ref.base)
    tasks = list({episode.task.content_hash: episode.task for episode in episodes}.values())
    submission = recorded_submission(db, "import", settled, replace(ref, version=0), {EXACT: exact}, tasks, weights)
    return PreparedImport(submission, episodes, exact, 0 if exact_only else without, {k: n for k, n in left_out.items() if n})


def _nothing(left_out: Mapping[str, int]) -> DatasetError:
    reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.items() if count)
    message = f"No trace is left to import ({reasons})." if reasons else "There is no trace to import: the file has no span."
    return DatasetError(message, f"The adapters are {', '.join(names('adapters'))}; for your own pass --adapter module:name.")


def _read(trace: Trace, readers: Sequence[Adapter], left_out: Counter[str]) -> _Read | None:
    trace_turns = _Read(trace)
    for span in trace.spans:
        try:
            turn = next((turn for reader in readers if (turn := _turn(reader, span)) is not None), None)
        except ValueError as error:
            left_out[str(error)[:250]] += 1
            return None
        if turn is not None:
            trace_turns.turns.append((span, turn))
            continue
        try:
            trace_turns.annotations += [(span, annotation) for annotation in annotations_of_span(span)]
        except ValueError as error:
            if span_names.KINDS.get(span.name) == "reward":
                left_out[f"a reward cannot be read: {str(error)[:200]}"] += 1
                return None
            trace_turns.annotations.append((span, _in_short(span, str(error))))
    trace_turns.keep_once()
    if not trace_turns.turns:
        left_out["no model turn"] += 1
        return None
    if len(trace_turns.turns) > MAX_TURNS or len(trace_turns.annotations) > MAX_OF_ATTEMPT:
        left_out[f"more than {MAX_TURNS} turns or {MAX_OF_ATTEMPT} other spans"] += 1
        return None
    return trace_turns


def _is_one_call(outer: Turn, inner: Turn) -> bool:
    reply = (outer.said.content, [(call.name, call.arguments) for call in outer.said.tool_calls])
    return reply == (inner.said.content, [(call.name, call.arguments) for call in inner.said.tool_calls])


def _in_short(span: Span, why: str) -> Annotation:
    """Return an annotation that stands for a span whose content is left out; `why` is the reason."""
    return Annotation(f"span:{span.span_id}", "span", span.name[:MAX_NAME], {"left_out": why[:200]}, seconds=span.seconds)


def _turn(reader: Adapter, span: Span) -> Turn | None:
    try:
        return reader.turn(span)
    except ValueError as error:
        raise ValueError(f"a turn cannot be read: {error}") from None
    except Exception as error:
        raise ValueError(f"the adapter {reader.name} raised {type(error).__name__}: {error}") from error


def _weights(read: Sequence[_Read]) -> dict[str, float]:
    """Return the weight of each reward, by name. The first reward of a span has weight 1, further rewards have weight 0."""
    rewards = [annotation for one in read for _, annotation in one.annotations if annotation.kind == "reward"]
    first = {annotation.name for annotation in rewards if annotation.id.endswith(":0")}
    return {name: float(name in first) for name in dict.fromkeys(annotation.name for annotation in rewards)}


def _episodes(
    read: Sequence[_Read], chat: Chat, vocabulary: int, exact: bool, weights: Mapping[str, float], left_out: Counter[str]
) -> Iterator[ImportedEpisode]:
    for trace_turns in read:
        try:
            seconds = [span.seconds for span, _ in trace_turns.turns]
            steps = traced_steps([turn for _, turn in trace_turns.turns], seconds, chat, vocabulary, exact)
        except (ValueError, ModelError) as error:
            left_out[str(error)[:200]] += 1
            continue
        yield _episode(trace_turns, steps, weights)


def _episode(read: _Read, steps: Sequence[StepRecord], weights: Mapping[str, float]) -> ImportedEpisode:
    trace, annotations = read.trace, _placed(read)
    rewards = {name: _whole(value) for name, value in rewards_of(annotations, len(steps)).items()}
    last, error = steps[-1].step, trace.error
    ended: StopReason = "agent_error" if error is not None else "max_tokens" if last.finish_reason == "length" else "answered"
    began, finished = trace.spans[0].start, max(span.end for span in trace.spans)
    return ImportedEpisode(
        key=trace.key[:200],
        task=_task(trace, read.turns[0][1]),
        steps=steps,
        rewards=rewards,
        reward=sum(weights[name] * value for name, value in rewards.items()),
        stop_reason=ended,
        answer="" if last.message.tool_calls else last.message.content,
        error="" if error is None else error[:2000],
        annotations=annotations,
        started_at=_moment(began),
        finished_at=_moment(finished) if finished >= began else None,
    )


def _whole(value: float | tuple[float, ...]) -> float:
    return value if isinstance(value, float) else sum(value)


def _placed(read: _Read) -> list[Annotation]:
    """Return the annotations, each with the latest turn before it. An id that occurs twice gets the trace's id."""
    starts = [span.start for span, _ in read.turns]
    placed: dict[str, Annotation] = {}
    for span, annotation in read.annotations:
        step = bisect_right(starts, span.start) - 1
        if annotation.id in placed:
            annotation = replace(annotation, id=annotation.id.replace("span:", f"span:{span.trace_id}", 1)[:64])
        placed[annotation.id] = replace(annotation, step=step if step >= 0 else None)
    return list(placed.values())


def _task(trace: Trace, first: Turn) -> Task:
    text = json.dumps([(message.role, message.content) for message in first.messages])
    key = trace.told(span_names.TASK)[:200] or f"import/{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return Task(key, first.messages, trace.told(span_names.REFERENCE))


def _moment(nanoseconds: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC) if nanoseconds else None
    except (ValueError, OverflowError, OSError):
        return None


def _check_spelling(episodes: Sequence[ImportedEpisode], base: str) -> None:
    """Check that the model's tokenizer decodes the tokens to the text of the turns."""
    texts = [(step.text, step.step.message.content.strip()) for episode in episodes for step in episode.steps]
    worded = [(text, content) for text, content in texts if content]
    if worded and not any(content in text for text, content in worded):
        text, content = worded[0]
        raise ModelError(
            f"The tokens do not belong to {base!r}: the recorded text {content[:60]!r} is decoded as {text[:60]!r}.",
            "Name the model that sampled them: --policy MODEL",
        )
