"""The engine that samples with an OpenAI-compatible server which returns texts without token ids.

The prompt is sent as text to `/v1/completions`. The ids of a turn are made from its text with this model's tokenizer, and may
differ from the sampled ids. Its logprobs are unknown (NaN). So such turns are recorded, but cannot train or be verified.
"""

import math

from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.errors import InfraError
from agentrl.workflow.inference.http import Connection, connections
from agentrl.workflow.inference.openai_engine import REASONS, model_names
from agentrl.workflow.inference.remote_engine import ServedEngine, ServerTurn, seed
from agentrl.workflow.inference.server_responses import Cards, TextCompletions
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import Message

MAX_STOPS = 4
"""The most stop strings of a request in OpenAI's API."""


def start(policy: Policy, settings: Settings) -> ServedEngine:
    """Return the engine for the servers at the machine's `engine_url`. The servers need not run yet.

    Raises:
        ConfigError: a URL is missing or invalid.
    """
    return ServedEngine(policy, [OpenAITextServer(policy, one) for one in connections(settings)], settings.slots)


class OpenAITextServer:
    """A client for the route of an OpenAI-compatible server that samples texts."""

    def __init__(self, policy: Policy, connection: Connection) -> None:
        self._policy = policy
        self._connection = connection
        self._model = ""
        chat = policy.chat
        self._end = chat.turn(Message("assistant", "."), ())[-1]
        self._end_texts = [text for text in map(chat.decode, ([token] for token in sorted(chat.end_ids))) if text]

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def greet(self) -> int:
        """Choose the server's model: the one with the policy's name, else the first one that the server lists. Return the
        policy's context window.

        Raises:
            InfraError: the server has no model.
        """
        cards = self._connection.read(Cards, "/v1/models").data
        if not cards:
            raise InfraError(f"The server at {self._connection.url} serves no model.")
        ours = model_names(self._policy)
        card = next((card for card in cards if card.id in ours), cards[0])
        self._model = card.id
        return card.max_model_len or self._policy.max_context

    def sample(self, request: GenerateRequest, limit: int) -> ServerTurn:
        """Sample one turn, and return it as the tokens of its text, with unknown logprobs."""
        body = {
            "model": self._model,
            "prompt": self._policy.chat.decode(request.prompt_ids),
            "max_tokens": limit,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": seed(request),
            "stop": [*self._end_texts, *request.stop][:MAX_STOPS],
        }
        choice = self._connection.read(TextCompletions, "/v1/completions", body).choices[0]
        if choice.finish_reason not in REASONS:
            raise InfraError(f"The server at {self._connection.url} ended a turn with {choice.finish_reason!r}.")
        reason = REASONS[choice.finish_reason]
        ids = self._policy.tokenizer.encode(choice.text, add_special_tokens=False)[:limit]
        if not ids or (reason == "stop" and ids[-1] not in self._policy.chat.end_ids):
            ids = [*ids[: limit - 1], self._end]
        return ServerTurn(ids, (math.nan,) * len(ids), reason)
