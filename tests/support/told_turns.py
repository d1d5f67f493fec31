"""Turns of chosen tokens in a real database, for what the page is told of them."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.workflow.store import steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import GroupWork
from agentrl.workflow.trajectory import GRAMMAR, CallRecord, Message, Step, StepRecord, StepRequest
from tests.support.played_runs import sampled

FAST = 0.15
"""Seconds in which each request is answered, on a machine that does nothing else."""
SLOWER = 6
"""How much slower a busy machine may be."""
TOKENIZER = "tokenizer.json"


def turn(index: int, prompt_ids: tuple[int, ...], sampled_ids: tuple[int, ...], **more: Any) -> Step:
    """A turn of these tokens, which says its number."""
    message = Message("assistant", f"turn {index}", "", ())
    told: dict[str, Any] = {"behavior_logprobs": (-0.5,) * len(sampled_ids), "finish_reason": "stop", "policy_version": 0}
    told |= {"prompt": (Message("user", f"asked {index}"),), "message": message}
    return Step(index, prompt_ids=prompt_ids, sampled_ids=sampled_ids, **{**told, **more})


def commit(db: Database, work: GroupWork, made: Step, position: int = 0, calls: tuple[CallRecord, ...] = ()) -> None:
    """A turn of the work's episode at that position."""
    commit_each(db, work, {position: made}, calls)


def commit_each(db: Database, work: GroupWork, made: dict[int, Step], calls: tuple[CallRecord, ...] = ()) -> None:
    """A turn of each of these episodes of the work."""
    told = [
        StepRecord(sampled(work, position).episode, each, work.policy_id, each.message.content, calls, _request_of(each))
        for position, each in made.items()
    ]
    steps.commit_sampled(db, work.fence, told)


def make_tokenizer(folder: Path) -> Path:
    """A model's folder with a byte-level tokenizer, hardly any token of which has more than one byte."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=258, initial_alphabet=letters, special_tokens=["<|end|>"])
    made.train_from_iterator(["ab ab"], trainer)
    folder.mkdir(parents=True)
    made.save(str(folder / TOKENIZER))
    return folder


def ids_of(folder: Path, said: str) -> tuple[int, ...]:
    """The text's tokens by the tokenizer in that folder."""
    return tuple(Tokenizer.from_file(str(folder / TOKENIZER)).encode(said).ids)


def _request_of(step: Step) -> StepRequest | None:
    """What an agent asked for the step, if a grammar chose some of its tokens."""
    if not step.guided:
        return None
    asked = {GRAMMAR: {"schema": "{}", "sha256": "0" * 64, "library": "llguidance 1.0.0", "guided": list(step.guided)}}
    return StepRequest(f"{step.index:032x}", "0" * 64, asked)
