"""What the model says in the tests of clients: calls first, then the answer made of what they came to. No weights decide it.

agentrl eval --policy MODEL --engine tests.clients.scripted:scripted --agent tests.clients.agents:NAME
"""

import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Backend, Completion, GenerateRequest
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import Message, ToolCall

OPTIONS = frozenset({"temperature", "top_k", "top_p", "min_p", "stop"})
scripted = Backend("scripted", "tests.clients.scripted:start", True, True, frozenset({"lora", "full"}), True, OPTIONS, True)

ONCE, TWICE, PLAIN = "What is 15 minus 8?", "What are 2 plus 3, and 4 times 5?", "Say seven."
"""A question that needs one call, two at once, none."""
RUN, SUBMIT = "echo 7 > result.txt; cat result.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat result.txt"
"""What an agent with a shell does first, and last."""


def start(policy: Policy, settings: Settings) -> "Scripted":
    """The engine."""
    return Scripted(policy)


class Scripted:
    """Answers by what was said last in the prompt."""

    def __init__(self, policy: Policy) -> None:
        self._chat = policy.chat

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        threading.Thread(target=self._say, args=(request, future), daemon=True).start()
        return future

    def release(self, key: int | None = None) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing runs but what is over soon."""

    def _say(self, request: GenerateRequest, future: Future[Completion]) -> None:
        said: list[int] = []
        for token in self._chat.turn(answer(self._chat.decode(request.prompt_ids)))[: request.max_new_tokens]:
            said.append(token)
            if request.heard is not None and not request.heard(token):
                break
        ended = self._chat.has_end_token(said)
        with suppress(InvalidStateError):  # who asked has gone meanwhile
            future.set_result(Completion(tuple(said), (-0.5,) * len(said), "stop" if ended else "length", 0.01))


def answer(prompt: str) -> Message:
    """What is said to a prompt."""
    return answers(prompt)[0]


def answers(prompt: str) -> list[Message]:
    """What may be said to a prompt, the best first: a call, an answer that is a call, JSON, code, text."""
    system = prompt.partition("<|im_end|>")[0]
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    results = re.findall(r"<tool_response>\s*(\S+)\s*</tool_response>", last)
    tools = offered(system)
    possible = []
    if "bash" in tools:
        possible.append(calling("bash", {"command": SUBMIT if "tool_response" in last else RUN}))
    if "calculator" in tools and not re.search(r"tool_response|Observation:", last):
        asked = ("2+3", "4*5") if TWICE in last else ("15-8",) if ONCE in last else ()
        possible += [calling("calculator", *({"expression": each} for each in asked))] if asked else []
    for name in (name for name in tools if name not in ("calculator", "bash")):
        possible.append(calling(name, {name: 7 if name == "value" else "7" for name in tools[name]}))
    if "<code>" in system:
        possible.append(Message("assistant", "It is easy.\n<code>\nfinal_answer('7')\n</code>"))
    text = f"漢字 🙂 It is {' and '.join(results)}." if results else "It is 7."
    json_texts = ['{"value": 7}', '{"thought": "It is easy.", "code": "final_answer(\'7\')"}']
    by_prompt = json_texts[:1] if '"value"' in prompt or "key value" in prompt else []
    return [*possible, *(Message("assistant", content) for content in (*by_prompt, text, *json_texts))]


def calling(name: str, *calls: Mapping[str, Any]) -> Message:
    return Message("assistant", "", tool_calls=tuple(ToolCall(name, arguments) for arguments in calls))


def offered(system: str) -> dict[str, list[str]]:
    """The names of the offered tools and of their parameters, as the tiny chat template ends the system text."""
    return {name: words.split(", ") for name, words in re.findall(r"([\w-]+)\((.*?)\)", system.rpartition("\n")[2])}


def ids_of(chat: Chat, request: GenerateRequest) -> Sequence[int]:
    """The tokens of the best answer that the request's grammar lets through."""
    possible = [chat.turn(message) for message in answers(chat.decode(request.prompt_ids))]
    if not request.grammar:
        return possible[0]
    return next(filter(None, (within(chat, request.grammar, ids) for ids in possible)))


def within(chat: Chat, grammar: str, ids: Sequence[int]) -> list[int]:
    """The same text in tokens that the grammar lets through; empty if it lets no such text through."""
    matcher, text, guided = chat.grammars.matcher(grammar), chat.decode(ids).encode(), list[int]()
    while text:
        allowed = matcher.allowed(len(chat.tokenizer)).nonzero()[0].tolist()
        pieces = {chat.bytes_of(token) or chat.decode([token]).encode(): token for token in allowed}
        piece = max((piece for piece in pieces if text.startswith(piece)), key=len, default=b"")
        if not piece:
            return []
        guided.append(pieces[piece])
        matcher.take(pieces[piece])
        text = text.removeprefix(piece)
    return guided
