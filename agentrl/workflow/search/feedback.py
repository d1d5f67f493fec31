"""Text about an episode for a critic: messages, tool results and rewards, with limited length."""

from collections.abc import Iterator

from agentrl.workflow.search import group_score
from agentrl.workflow.trajectory import Episode, Group

MAX_PART = 1500
MAX_FEEDBACK_CHARS = 6000
"""The most characters of the text about an episode. `MAX_PART` is the most characters of one message."""


def conversation(episode: Episode) -> str:
    """Return the messages of the episode as text, in order, cut to the maximum length."""
    return cut("\n".join(_lines(episode)), MAX_FEEDBACK_CHARS)


def feedback(episode: Episode) -> str:
    """Return the episode's outcome as text: its reward and parts, its stop reason, the reference and its failed tool calls."""
    lines = [f"reward {_number(episode.reward)}"]
    lines += [f"{name} {_number(value)}" for name, value in list(episode.rewards.items())[:16]]
    lines += [f"it ended: {episode.stop_reason or episode.status}"]
    if episode.task.reference:
        lines.append(f"the right answer: {cut(episode.task.reference, MAX_PART)}")
    for step in episode.steps:
        pairs = zip(step.message.tool_calls, step.results or (), strict=False)
        lines += [f"{call.name:.100} failed: {cut(result.content, 300)}" for call, result in pairs if result.error_class]
    return cut("\n".join(lines), MAX_FEEDBACK_CHARS)


def describe_group(group: Group) -> str:
    """Return the text for a group: the group's first episode with a reward, and the rewards of all its episodes."""
    episode = next((member for member in group.episodes if member.reward is not None), group.episodes[0])
    mean = group_score(group)
    head = f"mean reward of {len(group.episodes)} episodes: {_number(mean)}\n" if len(group.episodes) > 1 else ""
    return f"{conversation(episode)}\n--\n{head}{feedback(episode)}"


def cut(text: str, max_chars: int) -> str:
    """Shorten the text to `max_chars` characters by removing its middle."""
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]} [...] {text[-half:]}"


def _lines(episode: Episode) -> Iterator[str]:
    if not episode.steps:
        yield from (f"{message.role}: {cut(message.content, MAX_PART)}" for message in episode.task.messages)
    for step in episode.steps:
        for message in step.prompt:
            yield f"{message.role}: {cut(message.content, MAX_PART)}"
        calls = "".join(
            f"\n  calls {call.name:.100}({cut(str(dict(call.arguments)), 300)})" for call in step.message.tool_calls
        )
        yield f"assistant: {cut(step.message.content, MAX_PART)}{calls}"
    last = episode.steps[-1].results if episode.steps else None
    yield from (f"tool: {cut(result.content, MAX_PART)}" for result in last or ())
    if episode.answer:
        yield f"answer: {cut(episode.answer, MAX_PART)}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
