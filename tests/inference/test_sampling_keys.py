"""The keys of draws: each turn has its own, whatever was sampled before it."""

import hashlib
from dataclasses import replace

import pytest

from agentrl.workflow.trajectory import ROOT, Episode, Message, SamplingKey, Step, Task

TASK = Task("train/0", (Message("user", "hi"),), "")
KEY = SamplingKey(3, "train", 1, TASK.key, 2)
SAID = Message("assistant", "ok")


def step(index: int, prompt: tuple[int, ...], parent: int | None = ROOT, shared: int | None = None) -> Step:
    return Step(index, (), prompt, (7, 8), (-1.0, -1.0), "stop", SAID, 0, parent=parent, shared=shared)


def test_sampling_key_is_documented_hash() -> None:
    ids = b"".join(token.to_bytes(4, "little") for token in (1, 2, 70_000))
    text = f"3|train|1|train/0|2|{hashlib.sha256(ids).hexdigest()}|4"
    expected = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    assert KEY.of_turn((1, 2, 70_000), 4) == expected


def test_sampling_key_is_independent_of_turn_order() -> None:
    prompts = [(1, 2), (1, 3), (4,)]
    one, other = (
        Episode(TASK, steps=tuple(step(index, prompt) for index, prompt in enumerate(order)))
        for order in (prompts, prompts[::-1])
    )
    assert [KEY.of_step(one, index) for index in range(3)] == [KEY.of_step(other, 2 - index) for index in range(3)]
    assert len({KEY.of_step(one, index) for index in range(3)}) == 3


def test_sampling_key_of_repeated_turn_is_new_in_any_chain() -> None:
    # 0: a prompt; 1: goes on from it; 2: the same whole prompt in a new chain; 3: shares a part of 1, and asks it a third time.
    steps = (step(0, (1, 2)), step(1, (5,), 0), step(2, (1, 2, 7, 8, 5)), step(3, (8, 5), 1, 3))
    episode = Episode(TASK, steps=steps)
    prompt = (1, 2, 7, 8, 5)
    assert all(episode.tokens_of(index)[:-2] == prompt for index in (1, 2, 3))
    assert [episode.times_asked(prompt, before) for before in range(5)] == [0, 0, 1, 2, 3]
    assert episode.times_asked((1, 2, 7, 8, 6)) == 0, "as long, and another"
    keys = [KEY.of_step(episode, index) for index in range(4)]
    assert len(set(keys)) == 4
    assert keys[1:] == [KEY.of_turn(prompt, asked) for asked in range(3)]
    assert KEY.of_next(episode, prompt) == KEY.of_turn(prompt, 3)


@pytest.mark.parametrize("count", range(4))
def test_sampling_key_of_resumed_episode_equals_record(count: int) -> None:
    steps = (step(0, (1, 2)), step(1, (1, 2)), step(2, (5,), 0), step(3, (1, 2)))
    whole = Episode(TASK, steps=steps)
    resumed = replace(whole, steps=steps[:count])
    prompt = whole.tokens_of(count)[:-2]
    assert KEY.of_next(resumed, prompt) == KEY.of_step(whole, count)
