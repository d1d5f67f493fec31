"""What the model says in the tests of clients: calls first, then the answer made of what they came to. No weights decide it.

agentrl eval --policy MODEL --engine tests.clients.scripted:scripted --agent tests.clients.agents:NAME
"""

import re
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from agentrl.workflow.engines import Backend, Completion, GenerateRequest
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import Message, ToolCall

OPTIONS = frozenset({"temperature", "top_k", "top_p", "min_p", "stop"})
scripted = Backend("scripted", "tests.clients.scripted:start", True, True, frozenset({"lora", "full"}), True, OPTIONS, True)

ONCE, TWICE, PLAIN = "What is 15 minus 8?", "What are 2 plus 3, and 4 times 5?", "Say seven."
"""A question that needs one call, two at once, none."""


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
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if "Observation:" in last:  # smolagents tells results so, and wants its answer as a call
        return Message("assistant", "", tool_calls=(ToolCall("final_answer", {"answer": re.findall(r"\d+", last)[-1]}),))
    if "tool_response" in last:
        found = re.findall(r"<tool_response>\s*(\S+)\s*</tool_response>", last)
        return Message("assistant", f"漢字 🙂 It is {' and '.join(found)}.")
    if TWICE in last:
        asked = ("2+3", "4*5")
    elif ONCE in last:
        asked = ("15-8",)
    else:
        return Message("assistant", "It is 7.")
    return Message("assistant", "", tool_calls=tuple(ToolCall("calculator", {"expression": each}) for each in asked))
