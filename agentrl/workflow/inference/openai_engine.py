"""The engine that samples with an OpenAI-compatible server which returns token ids and logprobs, such as vLLM.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 8 --generation-config vllm

Prompts are sent as token ids to `/v1/completions`. The base is requested by its own name, a trained adapter by its sha256.
First, `/v1/load_lora_adapter` loads the adapter from its folder, which the server must see at the same path
(`exported_adapters`). Every response must name the requested model. Adapters that this process published and no longer needs
are unloaded. If the server lost an adapter, it is published again.

Logprobs must be those at the sampling temperature over the complete vocabulary. At temperature 1 without top_k, top_p and
min_p, all servers return the same logprobs. Otherwise the logprobs depend on vLLM's `--logprobs-mode`, which a test request
detects. Options that make the server return other logprobs are refused.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

from agentrl.workflow.engines import GenerateRequest, Likeliest
from agentrl.workflow.errors import AgentRLError, ConfigError, InfraError, ModelError
from agentrl.workflow.inference import exported_adapters
from agentrl.workflow.inference.http import Connection, RequestRefused, base_card, connections
from agentrl.workflow.inference.remote_engine import ServedEngine, ServerTurn, likeliest, logprobs, seed, token_ids
from agentrl.workflow.inference.server_responses import Card, Cards, Choice, Completions, Logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import FinishReason, PolicyRef

log = getLogger("agentrl.openai")

KEEP = 10
"""The number of this process's adapters that stay on the server when no turn needs them.

This is enough for nine overlapping iterations and one evaluation.
"""

REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
"""A mapping from the server's finish reasons to agentrl's."""
_TOKEN = re.compile(r"token_id:([0-9]{1,10})")
"""The pattern of the names that vLLM gives tokens with `return_tokens_as_token_ids`."""

_COLD_TEMPERATURE, _HOT_TEMPERATURE = 0.25, 2.0
"""The temperatures of the test requests for the logprobs mode. 2 is the highest that vLLM allows."""


def start(policy: Policy, settings: Settings) -> ServedEngine:
    """Return the engine for the servers at the machine's `engine_url`. The servers need not run yet.

    Raises:
        ConfigError: a URL is missing or invalid.
    """
    return ServedEngine(policy, [OpenAIServer(policy, one) for one in connections(settings)], settings.slots)


class OpenAIServer:
    """A client for the routes of a vLLM server that sample turns and publish adapters."""

    def __init__(self, policy: Policy, connection: Connection) -> None:
        self._policy = policy
        self._connection = connection
        self._base = ""
        self._raw: bool | None = None
        self._lock = threading.Lock()
        self._users: OrderedDict[str, int] = OrderedDict()
        self._published: set[str] = set()

    def close(self) -> None:
        """Close the connections. Adapters stay on the server, because another worker may sample from them."""
        self._connection.close()

    def greet(self) -> int:
        """Check that the server serves the policy's base, and return the server's context window in tokens.

        Raises:
            ModelError: the base has another name. Only the name can be checked.
        """
        card = base_card(self._connection, model_names(self._policy))
        self._base, self._raw = card.id, None
        return card.max_model_len or self._policy.max_context

    def sample(self, request: GenerateRequest, limit: int) -> ServerTurn:
        """Sample one turn. If the server does not have the adapter, publish it first."""
        self._check_logprobs(request)
        body = self._body(request, limit)
        try:
            return self._turn(request, body)
        except RequestRefused as error:
            if error.status != 404 or not request.policy.path:
                raise
        with self._lock:
            self._published.discard(request.policy.sha256)
        return self._turn(request, body)

    def _turn(self, request: GenerateRequest, body: dict[str, Any]) -> ServerTurn:
        with self._model(request.policy) as name:
            choice = self._complete(name, body)
        url = self._connection.url
        ids = token_ids(choice.token_ids, self._policy.vocabulary, url)
        if choice.prompt_token_ids is not None and tuple(choice.prompt_token_ids) != request.prompt_ids:
            raise ModelError(f"The server at {url} sampled from a prompt other than the given one.")
        if choice.finish_reason not in REASONS:
            raise InfraError(f"The server at {url} ended a turn with {choice.finish_reason!r}.")
        values = choice.logprobs.token_logprobs if choice.logprobs else None
        top = self._top(choice.logprobs, request.top_logprobs) if request.top_logprobs else ()
        return ServerTurn(ids, logprobs(values, url), REASONS[choice.finish_reason], top)

    def _top(self, response: Logprobs | None, count: int) -> list[Likeliest]:
        url, places = self._connection.url, (response.top_logprobs if response else None) or []
        return [likeliest(_by_id(place or {}, url), count, self._policy.vocabulary, url) for place in places]

    def _complete(self, name: str, body: dict[str, Any]) -> Choice:
        reply = self._connection.read(Completions, "/v1/completions", {"model": name, **body})
        if reply.model != name:
            raise ModelError(
                f"The server at {self._connection.url} was asked for the model {name!r}, but {reply.model!r} answered."
            )
        return reply.choices[0]

    def _cards(self) -> list[Card]:
        return self._connection.read(Cards, "/v1/models").data

    def _body(self, request: GenerateRequest, limit: int) -> dict[str, Any]:
        """Return the body of the request.

        Every sampling option is set. Otherwise vLLM would take missing ones from the model's generation_config.
        """
        return {
            "prompt": list(request.prompt_ids),
            "max_tokens": limit,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed(request),
            "stop": list(request.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "ignore_eos": True,  # a turn ends with the chat template's end tokens only, which are:
            "stop_token_ids": sorted(self._policy.chat.end_ids),
            "logprobs": max(1, request.top_logprobs),
            "return_token_ids": True,
            **({"return_tokens_as_token_ids": True} if request.top_logprobs else {}),
        }

    # logprobs

    def _check_logprobs(self, request: GenerateRequest) -> None:
        cut = bool(request.top_k or request.min_p) or request.top_p < 1
        if request.temperature == 1 and not cut:
            return
        raw = self._raw  # read once: another thread may greet the server meanwhile
        if raw is None:
            raw = self._raw = abs(self._likeliest(_COLD_TEMPERATURE) - self._likeliest(_HOT_TEMPERATURE)) < 0.02
        if raw and request.temperature != 1:
            raise ConfigError(
                f"The server gives logprobs at temperature 1, and the run samples at {request.temperature:g}.",
                "Start vLLM with --logprobs-mode processed_logprobs, or set rollout.temperature to 1.",
            )
        if not raw and cut:
            raise ConfigError(
                "The server gives logprobs after top_k, top_p and min_p; the trainer's are over the whole vocabulary.",
                "Start vLLM with --logprobs-mode raw_logprobs and set rollout.temperature to 1, or sample without them.",
            )

    def _likeliest(self, temperature: float) -> float:
        """Return the highest logprob of any token that could follow a certain token, under the base at this temperature.

        The request's prompt is a token that every prompt contains.
        """
        prompt = tuple(sorted(self._policy.chat.end_ids))[:1]
        request = GenerateRequest(prompt, PolicyRef("", ""), 0, 0, 1, temperature)
        response = self._complete(self._base, self._body(request, 1)).logprobs
        first = next(iter(response.top_logprobs or []), None) if response else None
        return max(logprobs(list(first.values()) if first else None, self._connection.url))

    # adapters

    @contextmanager
    def _model(self, ref: PolicyRef) -> Iterator[str]:
        """Yield the name that the server has for the weights. The weights stay on the server until the context ends."""
        if not ref.path:
            yield self._base
            return
        with self._lock:
            if ref.sha256 not in self._published:
                self._publish(ref)
            self._users[ref.sha256] = self._users.get(ref.sha256, 0) + 1
            self._users.move_to_end(ref.sha256)
        try:
            yield ref.sha256
        finally:
            with self._lock:
                self._users[ref.sha256] -= 1
                self._retire()

    def _publish(self, ref: PolicyRef) -> None:
        folder = exported_adapters.exported_folder(self._policy, ref)
        if not self._has_model(ref.sha256):  # another worker may have published it meanwhile
            try:
                self._connection.tell("/v1/load_lora_adapter", {"lora_name": ref.sha256, "lora_path": str(folder)})
            except (RequestRefused, InfraError) as error:
                if not self._has_model(ref.sha256):
                    if isinstance(error, RequestRefused) or "max_lora_rank" in error.message:
                        raise _publish_error(error, folder) from error
                    raise
        self._published.add(ref.sha256)

    def _has_model(self, name: str) -> bool:
        return any(card.id == name for card in self._cards())

    def _retire(self) -> None:
        for name in list(self._users)[:-KEEP]:
            if self._users[name] == 0:
                try:
                    self._connection.tell("/v1/unload_lora_adapter", {"lora_name": name})
                except RequestRefused:
                    pass  # another worker unloaded it, or the server was restarted
                except AgentRLError as error:  # no turn fails because of it: the next turn tries again
                    log.warning("adapter %.12s stays on the server for now: %s", name, error)
                    return
                del self._users[name]
                self._published.discard(name)


def _by_id(place: Mapping[str, float], url: str) -> dict[int, float]:
    """Return the logprobs of the likeliest tokens at one position, by token id.

    Their texts cannot identify them, because several tokens may have the same text.
    """
    by_match = {_TOKEN.fullmatch(name): logprob for name, logprob in place.items()}
    if None in by_match:
        raise ModelError(
            f"The server at {url} returned the likeliest tokens without their ids.", "Do not request top_logprobs."
        )
    return {int(name[1]): logprob for name, logprob in by_match.items() if name}


def model_names(policy: Policy) -> set[str]:
    """Return the names under which a server may have the policy's base."""
    return {Path(policy.config.path).name, policy.folder.name}


def _publish_error(error: RequestRefused | InfraError, folder: Path) -> ConfigError:
    if isinstance(error, RequestRefused) and error.status in (404, 405) and "adapter" not in error.reason.lower():
        hint = "Start vLLM with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment."
    else:
        hint = f"Check that it can read {str(folder)!r}, and that --max-lora-rank is at least model.lora_r."
    return ConfigError(f"The server did not accept the trained adapter: {error.message}", hint)
