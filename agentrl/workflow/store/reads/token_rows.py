"""The stored tokens of some steps; the page's only read of blobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import among, select_rows
from agentrl.workflow.store.reads.episode_shape import in_parts
from agentrl.workflow.store.row_codecs import unpack

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, packed: what its prompt added, what it sampled, and the logprobs of that."""

    prompt_ids: bytes
    sampled_ids: bytes
    logprobs: bytes


def load_tokens(tx: Any, steps: Sequence[int]) -> dict[int, StepTokens]:
    """Return number of a step's row -> its tokens."""
    found: dict[int, StepTokens] = {}
    for some in in_parts(steps):
        query = f"""
            SELECT step_id, prompt_ids, sampled_ids, behavior_logprobs FROM step_tokens WHERE step_id IN ({among(some)})"""
        for row in select_rows(tx, query):
            kept = (bytes(row[name]) for name in ("prompt_ids", "sampled_ids", "behavior_logprobs"))
            found[row["step_id"]] = StepTokens(*kept)
    return found


def unpack_ids(packed: bytes, first: int, last: int) -> list[int]:
    """Return the ids from `first` to before `last` of packed ones."""
    return unpack("i", packed[first * TOKEN_BYTES : last * TOKEN_BYTES])
