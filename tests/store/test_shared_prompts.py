"""The first steps of a group store their prompt once, and each of them is read with it."""

from dataclasses import replace
from typing import Any

from sqlalchemy import text

from agentrl.workflow.store import rollout_claims, steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import downgrade, upgrade
from agentrl.workflow.store.reads import episode_rows, group_rows, turn_rows
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.rollout_claims import GroupWork
from agentrl.workflow.store.row_codecs import pack
from agentrl.workflow.trajectory import ROOT, Message, StepRecord, StepRequest
from tests.support.played_runs import EXPIRED, claim, play, sampled, start, step, submission, values

OWNERS = "SELECT coalesce(prompt_step_id, 0) FROM steps ORDER BY id"
STORED_IDS = "SELECT prompt_ids FROM step_tokens ORDER BY step_id"
IDS = step().prompt_ids
OTHER = (Message("user", "another question"),)


def begun(db: Database) -> GroupWork:
    """The claim of a group of two episodes."""
    return claim(db, start(db, submission())[0], lease=EXPIRED)


def other_prompt(record: StepRecord) -> StepRecord:
    return replace(record, step=replace(record.step, prompt=OTHER))


def stored_ids(db: Database) -> list[bytes]:
    return [bytes(packed) for packed in values(db, STORED_IDS)]


def check_reads(db: Database, work: GroupWork) -> None:
    """Every reader returns the whole prompt of both first steps, whose ids are 1 and 2."""
    for episode in work.episodes:
        assert episode_rows.find_episode(db, episode.id).episode.steps == (step(),)
        without_tokens = db.ask(lambda tx, id=episode.id: episode_rows.load_episode(tx, id, with_tokens=False))
        assert without_tokens.steps[0].prompt == step().prompt
        message = db.ask(lambda tx, id=episode.id: turn_rows.load_text(tx, id, "steps/0/messages/0/content"))
        assert message == "turn 0"
    prompts = [row["prompt"] for row in db.ask(lambda tx: turn_rows.load_steps(tx, [1, 2]))]
    prompts += [row["prompt"] for row in db.ask(lambda tx: group_rows.load_short_steps(tx, [1, 2])).values()]
    assert prompts == [[{"role": "user", "content": "turn 0"}]] * 4
    assert [one.prompt_ids for one in db.ask(lambda tx: turn_rows.load_tokens(tx, [1, 2])).values()] == [pack("i", IDS)] * 2
    assert found(db, "TURN 0") == [episode.id for episode in work.episodes]
    assert found(db, "[]") == []
    assert [episode.steps for episode in claim(db, work.fence.group, lease=EXPIRED).episodes] == [(step(),)] * 2


def found(db: Database, words: str) -> list[int]:
    return [row.id for row in episode_rows.list_episodes(db, EpisodeFilter("first", text=words)).rows]


def test_first_steps_of_one_commit_share_prompt(database: Database) -> None:
    work = begun(database)
    steps.commit_sampled(database, work.fence, [sampled(work), sampled(work, 1)])
    assert values(database, OWNERS) == [0, 1]
    assert stored_ids(database) == [pack("i", IDS), b""]
    check_reads(database, work)


def test_first_steps_of_two_workers_share_prompt(database: Database) -> None:
    work = begun(database)
    steps.commit_sampled(database, work.fence, [sampled(work)])
    work = claim(database, work.fence.group, lease=EXPIRED)
    steps.commit_sampled(database, work.fence, [sampled(work, 1)])
    assert values(database, OWNERS) == [0, 1]
    check_reads(database, work)


def test_first_step_after_restart_shares_prompt(database: Database) -> None:
    work = begun(database)
    steps.commit_sampled(database, work.fence, [sampled(work)])
    steps.restart_episode(database, work.fence, work.episodes[0].id)
    steps.commit_sampled(database, work.fence, [sampled(work), sampled(work, 1)])
    assert values(database, OWNERS) == [0, 1, 1]
    assert episode_rows.find_episode(database, work.episodes[0].id).episode.steps == (step(),)


def test_first_step_with_other_prompt_stores_it(database: Database) -> None:
    work = begun(database)
    other_ids = replace(sampled(work, 1), step=replace(step(), prompt_ids=(1, 2)))
    steps.commit_sampled(database, work.fence, [sampled(work), other_ids])
    assert values(database, OWNERS) == [0, 0]
    steps.restart_episode(database, work.fence, work.episodes[1].id)
    steps.commit_sampled(database, work.fence, [other_prompt(sampled(work, 1))])
    assert values(database, OWNERS) == [0, 0, 0]
    assert episode_rows.find_episode(database, work.episodes[1].id).episode.steps[0].prompt == OTHER


def test_later_steps_store_their_prompts(database: Database) -> None:
    work = begun(database)
    steps.commit_sampled(database, work.fence, [sampled(work), sampled(work, 1)])
    later = [replace(one, step=replace(one.step, index=1)) for one in (sampled(work), sampled(work, 1))]
    steps.commit_sampled(database, work.fence, later)
    assert values(database, OWNERS) == [0, 1, 0, 0]


def test_steps_of_agents_share_prompt(database: Database) -> None:
    work = begun(database)
    records = [
        replace(sampled(work, place), step=replace(step(), parent=ROOT), request=StepRequest(f"request {place}", "hash"))
        for place in range(2)
    ]
    stored = steps.commit_calls(database, work.fence, records)
    assert values(database, OWNERS) == [0, 1]
    read = [episode_rows.find_episode(database, episode.id).episode.steps for episode in work.episodes]
    assert read == [(one,) for one in stored]


def test_group_of_one_episode_notes_no_prompt(database: Database) -> None:
    wanted = submission(tasks=1, tasks_per_iteration=1)
    config = {**wanted.config, "rollout": {**wanted.config["rollout"], "group_size": 1}}
    (group,) = start(database, replace(wanted, config=config, group_size=1))
    work = claim(database, group)
    assert len(work.episodes) == 1
    steps.commit_sampled(database, work.fence, [sampled(work)])
    assert values(database, "SELECT prompt_hash FROM groups") == [None]


def test_first_step_after_upgrade_shares_prompt(database: Database) -> None:
    """A group that an older agentrl began has first steps, but no `prompt_step_id`."""
    work = begun(database)
    steps.commit_sampled(database, work.fence, [sampled(work)])
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE groups SET prompt_step_id = NULL, prompt_hash = NULL"))
    steps.restart_episode(database, work.fence, work.episodes[0].id)
    steps.commit_sampled(database, work.fence, [sampled(work, 1)])
    steps.commit_sampled(database, work.fence, [sampled(work)])
    assert values(database, OWNERS) == [0, 0, 2]


def test_downgrade_gives_each_step_its_prompt(database: Database) -> None:
    for group in start(database, submission()):
        play(database, group)
    before = episodes_of(database)
    downgrade(database, "0026")
    assert stored_ids(database) == [pack("i", IDS)] * 4
    assert values(database, "SELECT count(*) FROM steps WHERE CAST(prompt AS TEXT) LIKE '%turn 0%'") == [4]
    upgrade(database)
    assert episodes_of(database) == before
    assert rollout_claims.are_all_closed(database, [1, 2])


def episodes_of(db: Database) -> list[Any]:
    return [episode_rows.find_episode(db, number).episode for number in range(1, 5)]
