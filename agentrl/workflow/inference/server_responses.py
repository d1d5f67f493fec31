"""Shapes of the answers of servers that sample, one per route: `read` refuses an answer of another shape.

A shape has the fields that an engine reads; servers may send more. In a list, only the first wrong item is reported. Whether
the numbers are plausible is checked in `inference.remote_engine`.
"""

from reprlib import Repr
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agentrl.workflow.errors import InfraError


class ServerResponse(BaseModel):
    """A JSON object from a server, validated strictly: for example, `true` is not accepted as 1."""

    model_config = ConfigDict(frozen=True, strict=True)


Shape = TypeVar("Shape", bound=ServerResponse)
MAX_LIKELIEST = 1000


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LIKELIEST:
        raise ValueError(f"more than {MAX_LIKELIEST} tokens")
    return value


Likeliest = Annotated[dict[str, float], BeforeValidator(_few)]


class Card(ServerResponse):
    """A model that vLLM serves; `parent` is the base of an adapter, `max_model_len` its window in tokens."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = Field(None, gt=0)


class Cards(ServerResponse):
    """`/v1/models`."""

    data: list[Card] = Field(fail_fast=True)


class ChatMessage(ServerResponse):
    """A message of a chat."""

    content: str | None = None


class ChatChoice(ServerResponse):
    """An answer of a chat."""

    message: ChatMessage


class ChatReply(ServerResponse):
    """`/v1/chat/completions`."""

    choices: list[ChatChoice] = Field(fail_fast=True)


class Logprobs(ServerResponse):
    """The logprob of each sampled token, and text -> logprob of the likeliest ones."""

    token_logprobs: list[float | None] | None = Field(None, fail_fast=True)
    top_logprobs: list[Likeliest | None] | None = Field(None, fail_fast=True)


class Choice(ServerResponse):
    """A turn that vLLM sampled; a server that is new enough returns the prompt's ids, too."""

    token_ids: list[int] | None = Field(None, fail_fast=True)
    prompt_token_ids: list[int] | None = Field(None, fail_fast=True)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completions(ServerResponse):
    """`/v1/completions`, with one choice."""

    model: str | None = None
    choices: list[Choice] = Field(min_length=1, fail_fast=True)


class SlotWindow(ServerResponse):
    """The window of a slot of llama.cpp, in tokens."""

    n_ctx: int | None = Field(None, gt=0)


class Props(ServerResponse):
    """`/props` of llama.cpp."""

    default_generation_settings: SlotWindow = SlotWindow()


class TokenizeAnswer(ServerResponse):
    """`/tokenize` of llama.cpp."""

    tokens: list[int] = Field(fail_fast=True)


class Likely(ServerResponse):
    """A token that llama.cpp might have sampled, and its logprob."""

    id: int
    logprob: float | None = None


class Probability(ServerResponse):
    """The logprob of one token that llama.cpp sampled, and the likeliest ones at its place."""

    id: int | None = None
    logprob: float | None = None
    top_logprobs: list[Likely] | None = Field(None, max_length=MAX_LIKELIEST, fail_fast=True)


class LlamaTurn(ServerResponse):
    """`/completion` of llama.cpp."""

    tokens: list[int] | None = Field(None, fail_fast=True)
    completion_probabilities: list[Probability] | None = Field(None, fail_fast=True)
    stop_type: str | None = None


_short = Repr()
_short.maxstring = _short.maxother = 80


def read(shape: type[Shape], answer: Any, url: str, path: str) -> Shape:
    """Validate the answer of the server at `url` to `path`.

    Raises:
        InfraError: the answer has another shape; the message names the first difference.
    """
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "the answer"
        problem = f"{where}: {wrong['msg']} (found {_short.repr(wrong['input']):.80})"
        raise InfraError(f"The server at {url} answered {path} with data that this engine cannot read: {problem}.") from error
