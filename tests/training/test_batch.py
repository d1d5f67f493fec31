"""Episodes to tensors: exact ids, the right mask, and groups of rows within the budget."""

from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.workflow.training.training_rows import Row, collate, microbatches, pad, rows_of, size
from agentrl.workflow.trajectory import Episode, Message, Step, Task

TASK = Task("train/1", (), "")


def step(index: int, prompt: list[int], sampled: list[int], new_row: str | None = None) -> Step:
    logprobs = tuple(-0.5 - token / 8 for token in sampled)
    turn = Message("assistant", "")
    return Step(index, (), tuple(prompt), tuple(sampled), logprobs, "stop", turn, 1, new_row=new_row)


def episode(*turns: tuple[list[int], list[int], str | None]) -> Episode:
    return Episode(TASK, steps=tuple(step(index, *turn) for index, turn in enumerate(turns)), status="done")


IDS = st.lists(st.integers(1, 50), max_size=6)
TURN = st.tuples(IDS.filter(bool), IDS, st.sampled_from([None, None, "template"]))
EPISODES = st.lists(st.lists(TURN, max_size=4).map(lambda turns: episode(*turns)), max_size=6)


def test_rows_of_episode_join_prompts_and_sampled_tokens() -> None:
    (row,) = rows_of([episode(([1, 2], [3, 4], None), ([5], [6], None))])
    assert row.input_ids == (1, 2, 3, 4, 5, 6)
    assert row.action_mask == (False, False, True, True, False, True)
    assert row.behavior_logprobs == (0, 0, -0.875, -1.0, 0, -1.25)
    assert row.key == (0, 0)


def test_rows_of_episode_split_at_step_that_cannot_continue() -> None:
    rows = rows_of([episode(([1], [2], "first"), ([1, 2, 3], [4], "template"), ([5], [6], None))])
    assert [row.input_ids for row in rows] == [(1, 2), (1, 2, 3, 4, 5, 6)]
    assert [row.key for row in rows] == [(0, 0), (0, 1)]
    assert rows[1].action_mask == (False, False, False, True, False, True)


def test_rows_of_episode_omit_rows_without_sampled_tokens() -> None:
    rows = rows_of([episode(([1], [], None)), episode(), episode(([1], [2], None))])
    assert [row.episode for row in rows] == [2]


@given(EPISODES)
def test_batch_mask_is_exactly_what_was_sampled(episodes: list[Episode]) -> None:
    rows = rows_of(episodes)
    if not rows:
        return
    batch = collate(rows)
    for number, one in enumerate(episodes):
        mine = torch.tensor([row.episode == number for row in rows])[:, None] & batch.loss_mask
        sampled = [token for step in one.steps for token in step.sampled_ids]
        logprobs = [value for step in one.steps for value in step.behavior_logprobs]
        assert batch.input_ids[mine].tolist() == sampled
        assert batch.behavior_logprobs[mine].tolist() == logprobs
    assert batch.attention_mask.sum(-1).tolist() == [len(row.input_ids) for row in rows]
    assert not (batch.loss_mask & (batch.attention_mask == 0)).any()


def row_of(number: int, length: int) -> Row:
    return Row(number, 0, (1,) * length, (True,) * length, (True,) * length, (0.0,) * length)


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 100), st.integers(1, 8))
def test_microbatches_hold_every_row_once_within_the_budget(lengths: list[int], tokens: int, at_least: int) -> None:
    rows = [row_of(number, length) for number, length in enumerate(lengths)]
    pieces = microbatches(rows, tokens, at_least)
    assert sorted(row.episode for piece in pieces for row in piece) == list(range(len(rows)))
    assert all(len(piece) == 1 or len(piece) * max(len(row.input_ids) for row in piece) <= tokens for piece in pieces)
    assert len(pieces) >= min(at_least, len(rows))


def test_microbatches_join_rows_of_like_length_longest_first() -> None:
    pieces = microbatches([row_of(number, length) for number, length in enumerate([3, 9, 2, 10, 8, 3])], tokens=30)
    assert [[len(row.input_ids) for row in piece] for piece in pieces] == [[10, 9, 8], [3, 3, 2]]


def grouped(beginnings: list[int], lines: list[tuple[int, int]]) -> list[Row]:
    """Rows of (which beginning, trained tokens); beginnings are of these many tokens, and all different."""
    starts = [(100 + number, *range(1, length)) for number, length in enumerate(beginnings)]
    rows = [starts[which] + tuple(range(50, 50 + count)) for which, count in lines]
    masks = [(False,) * beginnings[which] + (True,) * count for which, count in lines]
    values = [tuple(-0.1 * place * trains for place, trains in enumerate(mask)) for mask in masks]
    return [Row(number, 0, *row) for number, row in enumerate(zip(rows, masks, masks, values, strict=True))]


def test_batch_shares_common_prefix_if_it_saves_tokens() -> None:
    rows = grouped([300, 290], [(0, 5), (1, 7), (0, 9), (1, 2)])
    batch = collate(rows, share=True)
    assert batch.prefixes is not None
    assert batch.prefixes.ids.shape == (2, 299)  # the last token of a prompt is read by every row: it predicts their first
    assert batch.prefixes.mask.sum(-1).tolist() == [299, 289]
    assert batch.prefixes.of.tolist() == [0, 1, 0, 1]
    for line, row in enumerate(rows):
        count = int(batch.attention_mask[line].sum())
        assert batch.input_ids[line, :count].tolist() == list(row.input_ids[row.prefix :])
    assert size(rows, share=True) < size(rows) == 4 * 309
    assert collate(rows[:2], share=True).prefixes is None  # nothing in common
    assert collate(grouped([20], [(0, 5), (0, 5)]), share=True).prefixes is None  # too short to be worth a call


def test_microbatches_join_rows_with_common_prefix_if_cheaper() -> None:
    rows = grouped([400, 400], [(0, 10), (1, 9), (0, 8), (1, 7)])
    assert [[row.episode for row in piece] for piece in microbatches(rows, 700, share=True)] == [[0, 2], [1, 3]]
    assert [[row.episode for row in piece] for piece in microbatches(rows, 900)] == [[0, 1], [2, 3]]


class Watched(tuple[int, ...]):
    """Ids that count how often a part of them is taken."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        Watched.taken += 1
        return super().__getitem__(key)


def test_microbatches_compare_each_prefix_once() -> None:
    rows = [replace(row, input_ids=Watched(row.input_ids)) for row in grouped([300] * 8, [(n % 8, 40 + n) for n in range(64)])]
    Watched.taken = 0
    pieces = microbatches(rows, 2000, share=True)
    assert len(pieces) > 4
    assert Watched.taken <= len(rows)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 900), st.booleans())
def test_microbatches_with_sharing_keep_each_row_and_value(lines: list[tuple[int, int]], tokens: int, share: bool) -> None:
    rows = grouped([200, 1, 150], lines)
    pieces = microbatches(rows, tokens, share=share)
    assert sorted(row.episode for piece in pieces for row in piece) == list(range(len(rows)))
    for piece in pieces:
        assert len(piece) == 1 or size(piece, share) <= tokens
        batch = collate(piece, share=share)
        known = [value for row in piece for value in compress(row.behavior_logprobs, row.loss_mask)]
        assert torch.equal(pad(torch.tensor(known), batch.loss_mask[:, 1:]), batch.behavior_logprobs[:, 1:])
