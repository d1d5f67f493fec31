"""What servers that sample answer, one shape per route: an answer of another shape goes no further than `read`.

A shape has what an engine looks at; servers may say more. Of a list only the first item that is wrong is
looked for. Whether its numbers can be believed is `inference.remote_engine`'s to say.
"""

from reprlib import Repr
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agentrl.workflow.errors import InfraError


class Answer(BaseModel):
    """A JSON object of a server; no value is taken for one of another kind, such as `true` for 1."""

    model_config = ConfigDict(frozen=True, strict=True)


Shape = TypeVar("Shape", bound=Answer)
MAX_LIKELIEST = 1000


def _few(found: Any) -> Any:
    if isinstance(found, dict) and len(found) > MAX_LIKELIEST:
        raise ValueError(f"more than {MAX_LIKELIEST} tokens")
    return found


Likeliest = Annotated[dict[str, float], BeforeValidator(_few)]


class Card(Answer):
    """A model that vLLM serves; `parent` is the base of an adapter, `max_model_len` its window in tokens."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = Field(None, gt=0)


class Cards(Answer):
    """`/v1/models`."""

    data: list[Card] = Field(fail_fast=True)


class Logprobs(Answer):
    """Logprobs of each sampled token, and of the likeliest ones by their texts."""

    token_logprobs: list[float | None] | None = Field(None, fail_fast=True)
    top_logprobs: list[Likeliest | None] | None = Field(None, fail_fast=True)


class Choice(Answer):
    """A turn that vLLM sampled; the ids of the prompt come back where the server is new enough."""

    token_ids: list[int] | None = Field(None, fail_fast=True)
    prompt_token_ids: list[int] | None = Field(None, fail_fast=True)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completions(Answer):
    """`/v1/completions`, of one choice."""

    model: str | None = None
    choices: list[Choice] = Field(min_length=1, fail_fast=True)


class Window(Answer):
    """The window of a slot of llama.cpp, in tokens."""

    n_ctx: int | None = Field(None, gt=0)


class Props(Answer):
    """`/props` of llama.cpp."""

    default_generation_settings: Window = Window()


class Tokens(Answer):
    """`/tokenize` of llama.cpp."""

    tokens: list[int] = Field(fail_fast=True)


class Probability(Answer):
    """The logprob of one token that llama.cpp sampled."""

    logprob: float | None = None


class LlamaTurn(Answer):
    """`/completion` of llama.cpp."""

    tokens: list[int] | None = Field(None, fail_fast=True)
    completion_probabilities: list[Probability] | None = Field(None, fail_fast=True)
    stop_type: str | None = None


_short = Repr()
_short.maxstring = _short.maxother = 80


def read(shape: type[Shape], found: Any, url: str, path: str) -> Shape:
    """What the server at `url` answered to `path`.

    Raises:
        InfraError: it has another shape; said of the first place where it has.
    """
    try:
        return shape.model_validate(found)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "the answer"
        said = f"{where}: {wrong['msg']} (found {_short.repr(wrong['input']):.80})"
        raise InfraError(f"The server at {url} answered {path} with what this engine cannot read: {said}.") from error
