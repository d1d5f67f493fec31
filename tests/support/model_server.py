"""A small server that speaks the routes of vLLM and llama.cpp over our own engine, and remembers what it sampled."""

import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from agentrl.workflow.checkpoints.sealed_folder import WEIGHTS, sha256_file
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.errors import AgentRLError
from agentrl.workflow.inference.llamacpp_engine import ends_within_character
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef


@dataclass
class Sampled:
    """One answer: which model, the prompt and what came of it."""

    model: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass
class Routes:
    """What the server does. `spoil` may change an answer of /v1/completions or /completion before it is sent.

    Args:
        policy: what it samples from.
        folder: where it keeps adapters.
        window: the tokens of a row.
        raw: its logprobs are of temperature 1, as vLLM's are unless it is told otherwise.
        key: the API key that it wants.
        runtime_lora: whether it has the routes for adapters.
        foreign: cards of other models that it serves, too.
        is_forgetful: llama.cpp as it is: it tells nothing of a token that ends within a character.
        instead: what it answers to paths of these names, and does not do.
    """

    policy: Policy
    folder: Path
    window: int = 512
    raw: bool = False
    key: str = ""
    runtime_lora: bool = True
    foreign: tuple[dict[str, Any], ...] = ()
    is_forgetful: bool = False
    instead: dict[str, tuple[int, Any]] = field(default_factory=dict)
    spoil: Callable[[dict[str, Any]], Any] = lambda reply: reply
    adapters: dict[str, PolicyRef] = field(default_factory=dict)
    sampled: list[Sampled] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    forced: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = RollingEngine(self.policy)
        self.name = self.policy.folder.name
        self.base = PolicyRef(str(self.policy.folder), self.policy.base_hash)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and what to send."""
        if path in self.instead:
            return self.instead[path]
        match path:
            case "/v1/models":
                return 200, {
                    "data": [*self.foreign, self._card(), *({"id": name, "parent": self.name} for name in self.adapters)]
                }
            case "/v1/completions":
                return self._complete(body)
            case "/v1/load_lora_adapter" if self.runtime_lora:
                return self._load(body["lora_name"], Path(body["lora_path"]))
            case "/v1/unload_lora_adapter" if self.runtime_lora:
                return (200, "Success") if self.adapters.pop(body["lora_name"], None) else (404, {"error": "no such adapter"})
            case "/props":
                return 200, {"default_generation_settings": {"n_ctx": self.window}}
            case "/tokenize":
                return 200, {"tokens": self.policy.tokenizer.encode(body["content"], add_special_tokens=False)}
            case "/completion":
                return self._llama(body)
            case _:
                return 404, {"detail": "Not Found"}

    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "root": str(self.policy.folder), "parent": None, "max_model_len": self.window}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return 400, {"error": f"The lora adapter '{name}' has already been loaded."}
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert (settings["peft_type"], settings["lora_alpha"]) == ("LORA", self.policy.config.lora_alpha)
        if settings["r"] != self.policy.rank:
            return 500, {"error": f"LoRA rank {settings['r']} is greater than max_lora_rank {self.policy.rank}."}
        taken = Path(tempfile.mkdtemp(dir=self.folder))
        shutil.copyfile(folder / "adapter_model.safetensors", taken / WEIGHTS)
        self.adapters[name] = PolicyRef(self.base.base, self.base.base_hash, str(taken), sha256_file(taken / WEIGHTS), 1)
        self.loads.append(name)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.bodies.append(body)
        model, prompt = body["model"], tuple(body["prompt"])
        if model != self.name and model not in self.adapters:
            return 404, {"error": {"message": f"The model `{model}` does not exist.", "code": 404}}
        if len(prompt) + body["max_tokens"] > self.window:
            return 400, {"error": {"message": f"This model's maximum context length is {self.window} tokens.", "code": 400}}
        if not 0 <= body["temperature"] <= 2:
            return 400, {"error": {"message": f"temperature must be in [0, 2], got {body['temperature']}.", "code": 400}}
        by_id = body.get("return_tokens_as_token_ids", False)
        done = self._sample(model, prompt, body["max_tokens"], body["temperature"], body["seed"], by_id * body["logprobs"])
        likeliest: list[dict[str, float]] = [{"x": self._likeliest(prompt, body["temperature"])}]
        if by_id:  # the sampled one first, whether it is among them or not
            drawn = zip(done.token_ids, done.logprobs, done.top, strict=True)
            likeliest = [{f"token_id:{one}": said for one, said in ((token, logprob), *top)} for token, logprob, top in drawn]
        logprobs = {"token_logprobs": list(done.logprobs), "top_logprobs": likeliest}
        choice = {"token_ids": list(done.token_ids), "logprobs": logprobs, "finish_reason": done.finish_reason, "text": "..."}
        return 200, self.spoil({"model": model, "choices": [{**choice, "prompt_token_ids": list(prompt)}]})

    def _llama(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "logit_bias" in body:
            return 200, self._llama_forced(tuple(body["prompt"]), body["logit_bias"][0][0], body["n_probs"])
        asked = (tuple(body["prompt"]), body["n_predict"], body["temperature"], body["seed"], body["n_probs"])
        done = self._sample(self.name, *asked)
        probabilities = [
            {"id": token, "logprob": logprob, "top_logprobs": [{"id": one, "logprob": said} for one, said in top]}
            for token, logprob, top in zip(done.token_ids, done.logprobs, done.top, strict=True)
        ]
        if self.is_forgetful:
            probabilities = [one for one, is_told in zip(probabilities, self._told(done.token_ids), strict=True) if is_told]
        ends = {"stop": "eos", "length": "limit"}[done.finish_reason]
        return 200, self.spoil(
            {"tokens": list(done.token_ids), "completion_probabilities": probabilities, "stop_type": ends, "model": "any"}
        )

    def _told(self, ids: Sequence[int]) -> Iterator[bool]:
        text, special = b"", self.policy.tokenizer.added_tokens_decoder
        for token in ids:
            text += b"" if token in special and special[token].special else self.policy.chat.bytes_of(token) or b""
            yield not ends_within_character(text)

    @torch.no_grad()
    def _llama_forced(self, prompt: tuple[int, ...], token: int, most: int) -> dict[str, Any]:
        self.forced.append(prompt)
        with self.policy.sampling() as model:
            row = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1].float(), -1)
        top = [{"id": int(one), "logprob": float(row[one])} for one in row.argsort(descending=True)[:most]]
        told = {"id": token, "logprob": float(row[token]), "top_logprobs": top}
        return {"tokens": [token], "completion_probabilities": [told], "stop_type": "eos"}

    def _sample(
        self, model: str, prompt: tuple[int, ...], most: int, temperature: float, seed: int, top: int = 0
    ) -> Completion:
        ref = self.adapters.get(model, self.base)
        done = self.engine.submit(GenerateRequest(prompt, ref, seed, 0, most, temperature, top_logprobs=top)).result()
        self.sampled.append(Sampled(model, prompt, done.token_ids, done.logprobs))
        return done

    @torch.no_grad()
    def _likeliest(self, prompt: tuple[int, ...], temperature: float) -> float:
        """As vLLM gives it beside the sampled one: of the logits as they are, or of those that are sampled from."""
        with self.policy.sampling() as model:
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].float()
        return float(torch.log_softmax(logits / (1.0 if self.raw else temperature), -1).max())


@contextmanager
def serving(routes: Routes, port: int = 0) -> Iterator[str]:
    """The URL of a server with these routes; connections that are open when it ends are cut."""
    server = _Server(("127.0.0.1", port), _handler(routes))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in server.connections:
            with suppress(OSError):  # over already
                connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever asked is gone."""


@contextmanager
def kept_port() -> Iterator[int]:
    """A port where nobody listens, and which no other program gets while our servers there come and go."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server's: both may have the port, one listens
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@contextmanager
def served(folder: Path, port: int = 0, lora_r: int = 4, **options: Any) -> Iterator[tuple[Routes, str]]:
    """A server for the model in `folder`, and its URL."""
    policy = Policy.load(ModelConfig(lora_r=lora_r), str(folder), "cpu", 1)
    with tempfile.TemporaryDirectory() as taken:
        routes = Routes(policy, Path(taken), **options)
        with serving(routes, port) as url:
            yield routes, url
        routes.engine.close()


def _handler(routes: Routes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond({})

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _respond(self, body: dict[str, Any]) -> None:
            if routes.key and self.headers.get("Authorization") != f"Bearer {routes.key}":
                status, answer = 401, {"error": "Unauthorized"}
            else:
                try:
                    status, answer = routes.answer(self.path, body)
                except AgentRLError as error:
                    status, answer = 500, {"error": str(error)}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    return Handler
