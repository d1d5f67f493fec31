"""Episodes to tensors: exact ids, the right mask, and groups of rows within the budget."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workflow.batch import Row, collate, microbatches, padded, rows_of
from workflow.trajectory import Episode, Message, Step, Task

torch.set_num_threads(1)

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


def test_an_episode_is_one_row_of_prompts_and_sampled_tokens() -> None:
    (row,) = rows_of([episode(([1, 2], [3, 4], None), ([5], [6], None))])
    assert row.input_ids == (1, 2, 3, 4, 5, 6)
    assert row.action_mask == (False, False, True, True, False, True)
    assert row.behavior_logprobs == (0, 0, -0.875, -1.0, 0, -1.25)
    assert row.key == (0, 0)


def test_a_step_that_could_not_continue_the_row_opens_another() -> None:
    rows = rows_of([episode(([1], [2], "first"), ([1, 2, 3], [4], "template"), ([5], [6], None))])
    assert [row.input_ids for row in rows] == [(1, 2), (1, 2, 3, 4, 5, 6)]
    assert [row.key for row in rows] == [(0, 0), (0, 1)]
    assert rows[1].action_mask == (False, False, False, True, False, True)


def test_a_row_in_which_nothing_was_sampled_is_left_out() -> None:
    rows = rows_of([episode(([1], [], None)), episode(), episode(([1], [2], None))])
    assert [row.episode for row in rows] == [2]


@given(EPISODES)
def test_the_masked_ids_of_a_batch_are_exactly_what_was_sampled(episodes: list[Episode]) -> None:
    rows = rows_of(episodes)
    if not rows:
        return
    batch = collate(rows)
    for number, one in enumerate(episodes):
        mine = torch.tensor([row.episode == number for row in rows])[:, None] & batch.action_mask
        sampled = [token for step in one.steps for token in step.sampled_ids]
        logprobs = [value for step in one.steps for value in step.behavior_logprobs]
        assert batch.input_ids[mine].tolist() == sampled
        assert batch.behavior_logprobs[mine].tolist() == logprobs
    assert batch.attention_mask.sum(-1).tolist() == [len(row.input_ids) for row in rows]
    assert not (batch.action_mask & (batch.attention_mask == 0)).any()
    assert torch.equal(batch.loss_mask, batch.action_mask)


def row_of(number: int, length: int) -> Row:
    return Row(number, 0, (1,) * length, (True,) * length, (True,) * length, (0.0,) * length)


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 100), st.integers(1, 8))
def test_microbatches_hold_every_row_once_within_the_budget(lengths: list[int], tokens: int, at_least: int) -> None:
    rows = [row_of(number, length) for number, length in enumerate(lengths)]
    pieces = microbatches(rows, tokens, at_least)
    assert sorted(row.episode for piece in pieces for row in piece) == list(range(len(rows)))
    assert all(len(piece) == 1 or len(piece) * max(len(row.input_ids) for row in piece) <= tokens for piece in pieces)
    assert len(pieces) >= min(at_least, len(rows))


def test_microbatches_put_rows_of_like_length_together_longest_first() -> None:
    pieces = microbatches([row_of(number, length) for number, length in enumerate([3, 9, 2, 10, 8, 3])], tokens=30)
    assert [[len(row.input_ids) for row in piece] for piece in pieces] == [[10, 9, 8], [3, 3, 2]]


def test_lines_are_padded_to_the_shape_they_are_needed_in() -> None:
    lines = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    assert padded(lines, torch.ones(2, 3, dtype=torch.float64)).tolist() == [[1, 2, 0], [3, 0, 0]]
