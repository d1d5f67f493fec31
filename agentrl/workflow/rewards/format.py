"""format: the share of an episode's turns that are well formed, from 0.0 to 1.0.

A turn is well formed if all of these hold:

- it ended by itself, not at the limit on its tokens;
- every tool call could be parsed and is written in the tool format, not as bare JSON. The tool need not exist, and its
    arguments may be wrong;
- its text has no remaining tag: each `<think>` or `<tool_call>` was closed once (a complete call at the very end is also read
    without its closing tag, and counts as closed);
- if it calls no tool, its last line is `#### N`, or the whole text is a number `N`. N is written as people write numbers: an
    optional sign and `$`, digits with or without thousands separators, decimals, an optional `%`, no unit.

An episode without a turn scores 0.0.
"""

import re

from agentrl.workflow.trajectory import Episode, Step

LEFT_OVER = re.compile(r"</?(?:think|tool_call)>")
ANSWER = re.compile(r"(?:(?:.*\n)?[ \t]*####[ \t]*)?[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?%?", re.DOTALL)


def format(episode: Episode) -> float:
    """Return the share of turns that are well formed."""
    if not episode.steps:
        return 0.0
    return sum(map(_well_formed, episode.steps)) / len(episode.steps)


def _well_formed(step: Step) -> bool:
    message = step.message
    if step.finish_reason != "stop" or LEFT_OVER.search(message.content) or LEFT_OVER.search(message.thought):
        return False
    if message.tool_calls:
        return all(call.error is None and not call.loose for call in message.tool_calls)
    return ANSWER.fullmatch(message.content.strip()) is not None
