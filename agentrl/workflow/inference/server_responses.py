"""The shapes of responses from servers that sample, one per route. `read` refuses a response that does not have its shape.

A shape has the fields that an engine reads; servers may send more. In a list, only the first wrong item is reported.
`inference.remote_engine` checks whether the numbers are plausible.
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
MAX_WORD, MAX_NAME = 40, 1000
"""The most characters of a reason for a turn's end, and of a model's name. Errors quote both."""


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LIKELIEST:
        raise ValueError(f"more than {MAX_LIKELIEST} tokens")
    return value


Likeliest = Annotated[dict[str, float], BeforeValidator(_few)]


class Card(ServerResponse):
    """A model that vLLM serves. `parent` is the base of an adapter, `max_model_len` the context window in tokens."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = Field(None, gt=0)


class Cards(ServerResponse):
    """The response of `/v1/models`."""

    data: list[Card] = Field(fail_fast=True)


class ChatMessage(ServerResponse):
    """The message of a chat response."""

    content: str | None = None


class ChatChoice(ServerResponse):
    """A choice of a chat response."""

    message: ChatMessage


class ChatReply(ServerResponse):
    """The response of `/v1/chat/completions`."""

    choices: list[ChatChoice] = Field(fail_fast=True)


class Logprobs(ServerResponse):
    """The logprobs of the sampled tokens and, for the position of each, the logprobs of the likeliest tokens, by their text."""

    token_logprobs: list[float | None] | None = Field(None, fail_fast=True)
    top_logprobs: list[Likeliest | None] | None = Field(None, fail_fast=True)


class Choice(ServerResponse):
    """A turn that vLLM sampled. Only newer servers return the prompt's ids."""

    token_ids: list[int] | None = Field(None, fail_fast=True)
    prompt_token_ids: list[int] | None = Field(None, fail_fast=True)
    logprobs: Logprobs | None = None
    finish_reason: str | None = Field(None, max_length=MAX_WORD)


class Completions(ServerResponse):
    """The response of `/v1/completions`, with one choice."""

    model: str | None = Field(None, max_length=MAX_NAME)
    choices: list[Choice] = Field(min_length=1, fail_fast=True)


class TextChoice(ServerResponse):
    """A turn of an OpenAI-compatible server that returns only its text."""

    text: str
    finish_reason: str | None = Field(None, max_length=MAX_WORD)


class TextCompletions(ServerResponse):
    """The response of `/v1/completions` without token ids."""

    choices: list[TextChoice] = Field(min_length=1, fail_fast=True)


class SlotWindow(ServerResponse):
    """The window of a llama.cpp slot, in tokens."""

    n_ctx: int | None = Field(None, gt=0)


class Props(ServerResponse):
    """The response of llama.cpp's `/props`."""

    default_generation_settings: SlotWindow = SlotWindow()


class TokenizeAnswer(ServerResponse):
    """The response of llama.cpp's `/tokenize`."""

    tokens: list[int] = Field(fail_fast=True)


class Likely(ServerResponse):
    """A token that llama.cpp could have sampled, and its logprob."""

    id: int
    logprob: float | None = None


class Probability(ServerResponse):
    """The logprob of one token that llama.cpp sampled, and the likeliest tokens at its position."""

    id: int | None = None
    logprob: float | None = None
    top_logprobs: list[Likely] | None = Field(None, max_length=MAX_LIKELIEST, fail_fast=True)


class LlamaTurn(ServerResponse):
    """The response of llama.cpp's `/completion`."""

    tokens: list[int] | None = Field(None, fail_fast=True)
    completion_probabilities: list[Probability] | None = Field(None, fail_fast=True)
    stop_type: str | None = Field(None, max_length=MAX_WORD)


_short = Repr()
_short.maxstring = _short.maxother = 80


def read(shape: type[Shape], answer: Any, url: str, path: str) -> Shape:
    """Check the response of the server at `url` to a request for `path`, and return it in the given shape.

    Raises:
        InfraError: the response has another shape; the message names the first difference.
    """
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "the answer"
        problem = f"{where}: {wrong['msg']} (found {_short.repr(wrong['input']):.80})"
        raise InfraError(f"The server at {url} answered {path} with data that this engine cannot read: {problem}.") from error
