"""The model as the rolling batch uses it. Each live turn has a numbered row: its tokens so far, with the values that the model
has cached for them. Rows are run in the fastest of three ways that is correct for the model.

- `slot_rows`: a slot for each row, one call of the model per token. The call is agentrl's own forward pass
  (`models.fast_forward`) or transformers'.
- `cache_rows.CacheRows`: transformers' own caches, one call for each group of rows of the same length.
- `cache_rows.TokenRows`: no cache.

agentrl's own forward pass is used for the families that our tests compare with transformers. Each other way is tested before it
is used: its logits must be those of a plain forward pass over the complete row, because the trainer computes them in that way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from agentrl.workflow.engines import nan_error
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.cache_rows import CacheRows, TokenRows
from agentrl.workflow.inference.sampling import sample
from agentrl.workflow.inference.slot_rows import DecodeGraphs, SlotRows
from agentrl.workflow.models.cache_layout import CacheLayout, read_layout
from agentrl.workflow.models.device_errors import classify
from agentrl.workflow.models.logprobs import causal_model, token_logprobs
from agentrl.workflow.models.policy import Policy

log = getLogger("agentrl.engine")

SAMPLED_WITH = "%s is sampled with %s"
SERVER_HINT = "Sample with a server that can run it: --engine openai."

HALF_ROUNDING, ROUNDING = 0.1, 1e-3
"""The largest mean difference of logits that counts as rounding, as a multiple of their standard deviation.

`HALF_ROUNDING` is for 16 bits, `ROUNDING` for all other precisions. A wrong cache makes a difference of about 1.
"""


class KeptBlock(Protocol):
    """The cached values of `rows` rows in one piece of memory, which has room for `tokens` tokens, as many for each row."""

    @property
    def rows(self) -> int: ...

    @property
    def tokens(self) -> int: ...


class Kept(Protocol):
    """The cached values of a row of which `length` tokens have been read. Rows may share a block."""

    @property
    def block(self) -> KeptBlock: ...

    @property
    def length(self) -> int: ...


class ModelRows(Protocol):
    """The model and the cached values of the live rows.

    Attributes:
        name: the description for logs.
        resumes: whether a row that `take` returned can be continued with several tokens at once.
        rewinds: whether the first tokens of a row can be copied after the row has read more tokens, and whether a failed call
            can be repeated.
        tokens: the number of tokens that fit into the allocated memory.
    """

    name: str
    resumes: bool
    rewinds: bool

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The CUDA graphs that read the next token of each row faster; None if there are none."""

    @property
    def tokens(self) -> int:
        """The number of tokens that fit into the allocated memory."""

    def reserve(self, count: int) -> None:
        """Tell that there will soon be `count` rows, so that memory is allocated once."""

    def read(self, first: int, rows: Sequence[tuple[int, ...]]) -> None:
        """Read new rows, shortest first, and number them from `first` on.

        Rows with these or higher numbers, which an exception left behind, are dropped.
        """

    def resume(self, first: int, rows: Any) -> None:
        """Continue rows that `take` returned, and number them from `first` on.

        Args:
            rows: pairs of the result of `take` and the new tokens of the row; pairs with the fewest new tokens come first.
        """

    def next_logits(self, newest: Tensor, read: Tensor) -> Tensor:
        """Read one more token of each row, and return the logits (n, V) after it.

        Args:
            newest: (n,), the token.
            read: (n,), the number of tokens that the row has read before.
        """

    def copy(self, source: int, first: int, count: int, length: int) -> None:
        """Make `count` new rows from the first `length` tokens of the row `source`. `first` is the first free number."""

    def drop(self, rows: Sequence[int], broken: Sequence[int], moves: Mapping[int, int], length: int) -> None:
        """Drop rows, and give other rows their numbers.

        Args:
            rows: the numbers of the rows to drop.
            broken: those of them whose logits were NaN.
            moves: the old number of each row that moves -> its new number, which is that of a dropped row.
            length: the most tokens that a row that moves has read.
        """

    def take(self, rows: Sequence[int], lengths: Sequence[int]) -> Sequence[Any]:
        """Return copies of the cached values of rows that have read so many tokens."""

    def compact(self, rows: Any) -> Sequence[Any]:
        """Copy results of `take`, all of one block, into a block without the block's other rows."""

    def clear(self) -> None:
        """Drop all rows and free the memory."""


@torch.no_grad()
def open_rows(policy: Policy) -> ModelRows:
    """Return the fastest correct way to run the policy's model.

    Raises:
        ModelError: no way is correct, because the model is not causal, needs other inputs than tokens, or returns NaN.
    """
    with policy.sampling() as model:
        config: PreTrainedConfig = causal_model(model).config
    layout = read_layout(config, policy.max_context)
    if layout is not None and policy.has_fast_forward():
        own = SlotRows(policy, config, layout)
        log.info(SAMPLED_WITH, config.model_type, own.name)
        return own
    fault = ""
    try:
        expected = _Expected.of(policy)
        for rows in _ways(policy, config, layout):
            fault = _try_out(rows, expected)
            rows.clear()
            if not fault:
                log.info(SAMPLED_WITH, config.model_type, rows.name)
                return rows
            log.info("%s cannot be sampled with %s: %s", config.model_type, rows.name, fault)
    except ModelError:
        raise
    except Exception as error:  # the model's own code may raise anything
        if classify(error) != "other":
            raise
        fault = _sentence(error)
    raise ModelError(f"The built-in sampler cannot run {config.model_type!r}: {fault}.", SERVER_HINT)


@torch.no_grad()
def sample_one(rows: ModelRows, policy: Policy) -> None:
    """Sample one token after a prompt of one token, as a test.

    Raises:
        ModelError: the model returns NaN.
    """
    rows.read(0, [()])
    logits = rows.next_logits(torch.tensor([min(3, policy.vocabulary - 1)]), torch.tensor([0]))
    _, logprobs = sample(logits, torch.tensor([0.5], dtype=torch.float64, device=logits.device), 1.0)
    if bool(logprobs.isnan().any()):
        raise nan_error()


def _ways(policy: Policy, config: PreTrainedConfig, layout: CacheLayout | None) -> Iterator[ModelRows]:
    # A mask of one mark per token cannot say which tokens are in the window of rows of unequal lengths.
    if layout is not None and (layout.window is None or config._attn_implementation == "sdpa"):
        yield SlotRows(policy, config, layout)
    yield CacheRows(policy)
    yield TokenRows(policy)


@dataclass(frozen=True, slots=True)
class _Expected:
    """The expected results of a test: the logits (T, V) of a plain forward pass for two rows of tokens.

    The second row is longer.
    """

    rows: tuple[tuple[int, ...], tuple[int, ...]]
    logits: tuple[Tensor, Tensor]
    rounding: float

    @classmethod
    def of(cls, policy: Policy) -> "_Expected":
        token_range = min(policy.vocabulary, 100)
        short, long = (
            tuple((3 + step * number) % token_range for number in range(length)) for step, length in ((7, 9), (11, 20))
        )
        if policy.max_context < len(long):
            raise ModelError(f"The model reads only {policy.max_context} tokens.")
        with policy.sampling() as model:
            logits = [
                model(input_ids=torch.tensor([row], device=policy.device), use_cache=False).logits[0]
                for row in (short, long, long[:13])
            ]
            ids = torch.tensor([long], device=policy.device)
            trained, _ = token_logprobs(model, ids, torch.ones_like(ids))
            rounding = ROUNDING if causal_model(model).dtype in (torch.float32, torch.float64) else HALF_ROUNDING
        if any(bool(tensor.isnan().any()) for tensor in logits):
            raise nan_error()
        if not _agree(logits[2], logits[1][:13], rounding):
            raise ModelError("The model is not causal: a token's logits depend on later tokens.", SERVER_HINT)
        own = logits[1][:-1].double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        if not _agree(trained[0], own, rounding):
            raise ModelError("Training does not support the position numbers of this model.", SERVER_HINT)
        return cls((short, long), (logits[0], logits[1]), rounding)


def _try_out(rows: ModelRows, expected: _Expected) -> str:
    """Return why the logits of the rows are wrong; empty if they are right.

    If only resuming rows gives wrong logits, set `resumes` to False and return an empty text.
    """
    fault = _try_rows(rows, expected, resumes=False)
    if rows.resumes and not fault:
        rows.clear()
        rows.resumes = not _try_rows(rows, expected, resumes=True)
    return fault


def _try_rows(rows: ModelRows, expected: _Expected, resumes: bool) -> str:
    (short, long), (of_short, of_long) = expected.rows, expected.logits
    results: list[Tensor] = []
    references: list[Tensor] = []

    def step(at_short: int, at_long: int) -> None:
        results.append(_step(rows, (short, at_short), (long, at_long)))
        references.append(torch.stack([of_short[at_short], of_long[at_long]]))

    try:
        rows.read(0, [short[:3], long[:10]])
        for number in range(4):
            step(3 + number, 10 + number)
        if resumes:
            rows.resume(2, [(*rows.take([1], [14]), long[14:17])])
            results.append(_step(rows, (short, 7), (long, 14), (long, 17)))
            references.append(torch.stack([of_short[7], of_long[14], of_long[17]]))
            rows.drop([1], [], {2: 1}, 18)
            step(8, 18)
    except Exception as error:
        if classify(error) != "other":
            raise
        return _sentence(error)
    agree = all(_agree(*pair, expected.rounding) for pair in zip(results, references, strict=True))
    return "" if agree else "its cache cannot be continued exactly"


def _step(rows: ModelRows, *tokens: tuple[tuple[int, ...], int]) -> Tensor:
    """Read one more token of each row, and return the logits (n, V) after it.

    A row is given by all of its tokens and the number of tokens that it has read before.
    """
    newest = torch.tensor([row[read] for row, read in tokens])
    return rows.next_logits(newest, torch.tensor([read for _, read in tokens]))


def _agree(actual: Tensor, expected: Tensor, rounding: float) -> bool:
    actual, expected = actual.double(), expected.double()
    return bool((actual - expected).abs().mean() <= rounding * expected.std())


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(".: ")
