"""An engine that says what a person can follow, token by token, to be interrupted; its start may wait for a file.

agentrl chat --model MODEL --engine tests.support.slow_engine:slow
"""

import os
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path

from agentrl.workflow.engines import Backend, Completion, GenerateRequest
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import Message, ToolCall

OPTIONS = frozenset({"temperature", "top_k", "top_p", "min_p", "stop"})
slow = Backend("slow", "tests.support.slow_engine:start", True, True, frozenset({"lora", "full"}), True, OPTIONS, True)

CALLING = Message("assistant", "Let me see.", tool_calls=(ToolCall("calculator", {"expression": "15-8"}),))


def start(policy: Policy, settings: Settings) -> "Slow":
    """The engine, once the file named SLOW_START is there."""
    while (file := os.environ.get("SLOW_START")) and not Path(file).exists():
        time.sleep(0.02)
    return Slow(policy)


class Slow:
    """Answers by what the user said last."""

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
        for token in self._chat.turn(self._answer(self._chat.decode(request.prompt_ids))):
            said.append(token)
            time.sleep(0.002)
            if request.heard is not None and not request.heard(token):
                break
        ended = self._chat.has_end_token(said)
        with suppress(InvalidStateError):  # who asked has gone meanwhile
            future.set_result(Completion(tuple(said), (-0.5,) * len(said), "stop" if ended else "length", 0.1))

    def _answer(self, prompt: str) -> Message:
        last = prompt[prompt.rindex("<|im_start|>user\n") :].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
        if "tool_response" in last:
            return Message("assistant", "It is 7.")
        if "minus" in last:
            return CALLING
        if "long" in last:
            return Message("assistant", "word " * 50_000 + "end")
        if "mark" in last:
            return Message("assistant", "\x1b[2J\x1b]0;owned\x07漢字 and 🙂")
        if "think" in last:
            return Message("assistant", "done", thought="hm")
        return Message("assistant", f"You said {len(last.splitlines())} lines.")
