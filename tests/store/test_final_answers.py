"""A long final answer that is the content of a step is stored once, and is read, sorted and found as if it were not."""

from dataclasses import replace

import pytest

from agentrl.workflow.store import planning, rollout_claims, steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.migrate import downgrade, upgrade
from agentrl.workflow.store.reads import episode_rows, eval_results, turn_rows
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.row_codecs import SORTED_CHARS
from agentrl.workflow.trajectory import Episode, Message, ToolCall
from tests.support.played_runs import claim, sampled, start, step, submission, task, values

ANSWERS = ("b: the sum of both numbers is of course forty-two", "a: the sum of both numbers is of course forty-one")
ENDING = "<|im_end|>"


def ended(db: Database, answers: tuple[str, ...] = ANSWERS, ending: str = ENDING) -> GroupWork:
    """A group whose episodes gave these answers, in a first step each. Their text is the answer and `ending`."""
    work = claim(db, start(db, submission(tasks=1, tasks_per_iteration=1))[0])
    for place, answer in enumerate(answers):
        turn = replace(step(), message=Message("assistant", answer))
        record = replace(sampled(work, place), step=turn, text=f"{answer if ending else ''}{ending}")
        steps.commit_sampled(db, work.fence, [record])
        episode = replace(work.episodes[place], steps=(turn,))
        outcome = Outcome(
            *(episode.id, "done", "answered", 1.0, {"numeric_answer": 1.0}),
            final_answer=episode.final_answer,
            answer_step=episode.answer_step,
        )
        rollout_claims.finish_episodes(db, work.fence, [outcome], work.reward_set, work.weights)
    return work


def check_reads(db: Database, work: GroupWork, answers: tuple[str, ...] = ANSWERS) -> None:
    """Every reader returns the whole answers."""
    ids = [episode.id for episode in work.episodes]
    assert values(db, "SELECT final_answer FROM v_episodes ORDER BY id") == [*answers]
    assert eval_results.load_answers(db, ids) == dict(zip(ids, answers, strict=True))
    for episode, answer in zip(ids, answers, strict=True):
        record = episode_rows.find_episode(db, episode)
        assert (record.row.final_answer, record.episode.final_answer, record.episode.answer) == (answer, answer, None)
        assert db.ask(lambda tx, id=episode: turn_rows.load_text(tx, id, "episode/final_answer")) == answer


def listed(db: Database, sort: str = "", text: str | None = None) -> list[int]:
    return [row.id for row in episode_rows.list_episodes(db, EpisodeFilter("first", text=text), Paging(sort=sort)).rows]


def test_long_answer_is_stored_in_its_step(database: Database) -> None:
    work = ended(database)
    assert values(database, "SELECT final_answer FROM episodes ORDER BY id") == [answer[:SORTED_CHARS] for answer in ANSWERS]
    check_reads(database, work)


def test_short_answer_is_stored_in_its_episode(database: Database) -> None:
    answers = ("42", "x" * SORTED_CHARS)
    check_reads(database, ended(database, answers), answers)
    assert values(database, "SELECT final_answer FROM episodes WHERE answer_step IS NULL ORDER BY id") == [*answers]


def test_list_sorts_by_answers_in_steps(database: Database) -> None:
    first, second = (episode.id for episode in ended(database).episodes)
    assert listed(database, "answer") == [second, first]
    assert listed(database, "-answer") == [first, second]


@pytest.mark.parametrize("ending", [ENDING, ""], ids=["in its text", "not in its text"])
def test_search_finds_end_of_answer_in_step(database: Database, ending: str) -> None:
    first, second = (episode.id for episode in ended(database, ending=ending).episodes)
    assert listed(database, text="forty-TWO") == [first]
    assert listed(database, text="of course forty") == [first, second]
    assert listed(database, text="forty-three") == []


def test_stand_in_of_fork_has_answer_of_parent(database: Database) -> None:
    parent = ended(database).episodes[0].id
    wanted = replace(submission("forked", kind="fork"), tasks=(), fork=Fork(parent, 0, with_parent=True))
    planning.submit(database, wanted)
    (stand_in,) = values(database, "SELECT id FROM episodes WHERE parent_id = :id AND inherited_steps > 0", id=parent)
    assert episode_rows.find_episode(database, stand_in).row.final_answer == ANSWERS[0]
    assert episode_rows.find_episode(database, stand_in).episode.final_answer == ANSWERS[0]


def test_downgrade_gives_each_episode_its_answer(database: Database) -> None:
    work = ended(database)
    downgrade(database, "0028")
    assert values(database, "SELECT final_answer FROM episodes ORDER BY id") == [*ANSWERS]
    upgrade(database)
    check_reads(database, work)


def test_answer_step_is_own_last_turn_without_calls() -> None:
    episode = Episode(task(0), steps=(step(text="one"), step(1, text="two")))
    assert (episode.answer_step, episode.final_answer) == (1, "two")
    assert replace(episode, answer="three").answer_step is None
    assert replace(episode, inherited=2).answer_step is None
    calling = replace(episode.steps[1], message=Message("assistant", "two", tool_calls=(ToolCall("calculator", {}),)))
    assert replace(episode, steps=(episode.steps[0], calling)).answer_step is None
    assert replace(episode, steps=()).answer_step is None
