"""The engine that samples with a llama.cpp server (`llama-server -m MODEL.gguf`): an untrained base, for eval and chat.

Prompts are sent as token ids to `/completion`. The response has the sampled ids and their logprobs at temperature 1, so no
other temperature is allowed. `/tokenize` shows whether the GGUF file has the same vocabulary as the policy. Whether the file
has the same weights, and in which precision, cannot be checked.

If a token ends within a character, the server returns no logprob for it. A separate request gets that logprob.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.workflow.engines import GenerateRequest, Likeliest
from agentrl.workflow.errors import ConfigError, InfraError, ModelError
from agentrl.workflow.inference.http import Connection, connections
from agentrl.workflow.inference.remote_engine import ServedEngine, ServerTurn, likeliest, logprobs, seed, token_ids
from agentrl.workflow.inference.server_responses import MAX_LIKELIEST, LlamaTurn, Probability, Props, TokenizeAnswer
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import FinishReason

_REASONS: dict[str | None, FinishReason] = {"eos": "stop", "limit": "length"}
_MAX_LISTED = MAX_LIKELIEST - 1
"""The number of likeliest tokens that the server lists when the logprob of one token is requested."""
_CERTAIN = 100.0
MAX_CHARACTER = 4
"""The longest character in UTF-8, in bytes."""
_PROBE = "Ünï 12345.6 == foo_bar(  )\n\n漢字"


def start(policy: Policy, settings: Settings) -> ServedEngine:
    """Return the engine for the servers at the machine's `engine_url`. The servers need not run yet.

    Raises:
        ConfigError: a URL is missing or invalid.
    """
    return ServedEngine(policy, [LlamaServer(policy, one) for one in connections(settings)], settings.slots)


class LlamaServer:
    """A client for the routes of a llama.cpp server."""

    def __init__(self, policy: Policy, connection: Connection) -> None:
        self._policy = policy
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    def greet(self) -> int:
        """Check that the server has the policy's tokenizer, and return the server's context window in tokens.

        Raises:
            ModelError: the server has another vocabulary.
        """
        window = self._connection.read(Props, "/props").default_generation_settings.n_ctx
        body = {"content": _PROBE, "add_special": False, "parse_special": False}
        theirs = self._connection.read(TokenizeAnswer, "/tokenize", body).tokens
        if theirs != self._policy.tokenizer.encode(_PROBE, add_special_tokens=False):
            message = f"The server at {self._connection.url} has another tokenizer than the model {self._policy.config.path}."
            raise ModelError(message, "Start llama-server with a GGUF file of that model.")
        return window or self._policy.max_context

    def sample(self, request: GenerateRequest, limit: int) -> ServerTurn:
        """Sample one turn from the base.

        Raises:
            ConfigError: the request has a temperature other than 1, or names a trained policy.
        """
        if request.temperature != 1:
            message = f"llama.cpp returns logprobs at temperature 1 only, but the temperature is {request.temperature:g}."
            raise ConfigError(message, "Sample at temperature 1, or with --engine rolling.")
        if request.policy.path:
            raise ConfigError("llama.cpp samples from an untrained base, not from a trained policy.", "Use --engine rolling.")
        reply, url = self._connection.read(LlamaTurn, "/completion", _body(request, limit)), self._connection.url
        ids = token_ids(reply.tokens or None, self._policy.vocabulary, url)
        if reply.stop_type not in _REASONS:
            raise InfraError(f"The server at {url} ended a turn with {reply.stop_type!r}.")
        probabilities = reply.completion_probabilities
        if probabilities is not None and len(probabilities) < len(ids):
            probabilities = self._complete_logprobs(request, ids, probabilities)
        values = None if probabilities is None else [token.logprob for token in probabilities]
        top = [self._top(token, request.top_logprobs) for token in probabilities or ()] if request.top_logprobs else ()
        return ServerTurn(ids, logprobs(values, url), _REASONS[reply.stop_type], top)

    def _complete_logprobs(
        self, request: GenerateRequest, ids: Sequence[int], probabilities: Sequence[Probability]
    ) -> list[Probability]:
        """Return the logprob of each sampled token.

        For tokens that end within a character, which the server leaves out, ask for it separately.

        Raises:
            InfraError: the server returned logprobs of other tokens, or did not return the logprob of a sampled token.
        """
        rest, complete, text = list(reversed(probabilities)), list[Probability](), b""
        added = self._policy.tokenizer.added_tokens_decoder
        for place, token in enumerate(ids):
            silent = token in added and added[token].special  # it is no text there
            text = text[-MAX_CHARACTER:] + (b"" if silent else self._policy.chat.bytes_of(token) or b"")
            if rest and rest[-1].id == token and not ends_within_character(text):
                complete.append(rest.pop())
            else:
                complete.append(self._lone_logprob(request, ids[:place], token))
        if rest:
            raise InfraError(f"The server at {self._connection.url} returned logprobs of tokens that it did not sample.")
        return complete

    def _lone_logprob(self, request: GenerateRequest, before: Sequence[int], token: int) -> Probability:
        """Request the logprob of one token after the tokens before it.

        The server lists the logprobs of the likeliest tokens only with a sampled token. So the request forces the server to
        sample an end token, and the wanted token is looked up in the list.

        Raises:
            InfraError: the token is not in the list.
        """
        longer = replace(request, prompt_ids=(*request.prompt_ids, *before))
        end = min(self._policy.chat.end_ids)
        body = _body(longer, 1) | {"n_probs": min(_MAX_LISTED, self._policy.vocabulary), "logit_bias": [[end, _CERTAIN]]}
        probabilities = self._connection.read(LlamaTurn, "/completion", body).completion_probabilities or []
        likely = (probabilities[0].top_logprobs if probabilities else None) or []
        logprob = next((one.logprob for one in likely if one.id == token), None)
        if logprob is None:
            raise InfraError(f"The server at {self._connection.url} did not return the logprob of a sampled token.")
        return Probability(id=token, logprob=logprob, top_logprobs=likely)

    def _top(self, probability: Probability, count: int) -> Likeliest:
        if probability.top_logprobs is None:
            message = f"The server at {self._connection.url} does not return the likeliest tokens."
            raise ModelError(message, "Do not request top_logprobs, or use a newer llama-server.")
        logprobs = {one.id: one.logprob for one in probability.top_logprobs}
        return likeliest(logprobs, count, self._policy.vocabulary, self._connection.url)


def ends_within_character(text: bytes) -> bool:
    """Return True if the text ends with an incomplete character of several bytes. llama.cpp uses the same rule."""
    for back in range(1, min(MAX_CHARACTER, len(text)) + 1):
        lead = text[-back]
        length = 2 if lead & 0xE0 == 0xC0 else 3 if lead & 0xF0 == 0xE0 else 4 if lead & 0xF8 == 0xF0 else 1
        if back < length:
            return True
    return False


def _body(request: GenerateRequest, limit: int) -> dict[str, Any]:
    """Return the body of the request. Every sampling option is set, because the server's defaults differ from agentrl's."""
    return {
        "prompt": list(request.prompt_ids),
        "n_predict": limit,
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed(request) % 2**32,
        "n_probs": max(1, request.top_logprobs),
        "return_tokens": True,
        "cache_prompt": True,
    }
