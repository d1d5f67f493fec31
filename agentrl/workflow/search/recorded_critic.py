"""The critic model of a search, at a chat completions endpoint. A request whose answer is recorded is not sent again."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.workflow.config import SearchConfig
from agentrl.workflow.inference.http import Connection
from agentrl.workflow.inference.server_responses import ChatReply
from agentrl.workflow.settings import Settings

AT_ONCE = 8
MAX_ANSWER = 100_000
"""The maximum length of an answer, in characters. Longer answers are cut."""
MAX_BYTES = 4 * 2**20
"""The maximum size of a response body, in bytes."""

Recorded = Callable[[str, list[dict[str, str]], str, float], str]
"""A function that stores an answer: from (key, messages, answer, seconds) to the stored answer. If another process stored an
answer first, that answer is returned.
"""


class RecordedCritic:
    """A critic whose answers are stored.

    Args:
        config: the run's section `search`, which names the critic's model.
        settings: the settings with `critic_url` and `critic_key`.
        answers: the stored answers, by key.
        record: the function that stores an answer.

    Raises:
        ConfigError: no URL is configured.
    """

    def __init__(self, config: SearchConfig, settings: Settings, answers: Mapping[str, str], record: Recorded) -> None:
        self._config, self._answers, self._record = config, answers, record
        self._connection = Connection(settings, "critic", MAX_BYTES)
        self._times: Counter[str] = Counter()

    def __call__(self, prompt: str) -> str:
        """See `search.Critic`."""
        return self.each([prompt])[0]

    def each(self, prompts: Sequence[str]) -> list[str]:
        """See `search.Critic`."""
        keys = [self._key(prompt) for prompt in prompts]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._answer, prompts, keys))

    def _key(self, prompt: str) -> str:
        """Hash the model, its options, the prompt, and how often this prompt was sent before."""
        text = json.dumps([self._config.critic, self._config.critic_temperature, self._config.critic_tokens, prompt])
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._times[digest] += 1
        return hashlib.sha256(f"{digest} {self._times[digest]}".encode()).hexdigest()

    def _answer(self, prompt: str, key: str) -> str:
        if key in self._answers:
            return self._answers[key]
        messages = [{"role": "user", "content": prompt}]
        body: dict[str, Any] = {"model": self._config.critic, "messages": messages, "max_tokens": self._config.critic_tokens}
        body["temperature"] = self._config.critic_temperature
        started = time.perf_counter()
        reply = self._connection.read(ChatReply, "/v1/chat/completions", body)
        text = (reply.choices[0].message.content or "")[:MAX_ANSWER] if reply.choices else ""
        return self._record(key, messages, text, time.perf_counter() - started)

    def close(self) -> None:
        self._connection.close()
