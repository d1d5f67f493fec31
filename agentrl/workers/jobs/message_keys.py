"""By what a message is known again, however a client writes it: ids of calls, the order of keys and outer white space aside."""

import json
from collections.abc import Sequence
from hashlib import sha256

from agentrl.workflow.trajectory import Message


def key_of(message: Message) -> bytes:
    """What is the same for messages that say the same, thoughts included."""
    return _hash(message, message.thought.strip())


def key_without_thought(message: Message) -> bytes:
    """The same, whatever was thought before."""
    return _hash(message, "")


def next_digest(digest: bytes, key: bytes) -> bytes:
    """The hash of a conversation and one more message."""
    return sha256(digest + key).digest()


def goes_on(messages: Sequence[Message]) -> bool:
    """Whether these messages, after a turn of the policy, are others' alone."""
    return all(message.role != "assistant" for message in messages)


def _hash(message: Message, thought: str) -> bytes:
    calls = [[call.name, call.arguments] for call in message.tool_calls if call.error is None]
    said = [message.role, message.content.strip(), thought, calls]
    return sha256(json.dumps(said, sort_keys=True, default=dict).encode()).digest()
