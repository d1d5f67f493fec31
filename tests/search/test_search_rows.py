"""The rows of a search: rounds are added once, versions are kept once, answers are kept once, and what was chosen is marked."""

import time
from dataclasses import replace
from typing import Any

import pytest

from agentrl.cli.eval_run import eval_run_of
from agentrl.cli.evaluate import _env_at_hand
from agentrl.cli.resolve_targets import find_policy
from agentrl.workers.requests.search_request import divide
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ConfigError, Fenced, NotFoundError
from agentrl.workflow.store import planning, search_rounds
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.reads.resource_rows import (
    CriticCallFilter,
    ResourceFilter,
    list_critic_calls,
    list_resources,
)
from agentrl.workflow.store.reads.search_tree import MAX_DIFF_LINES, diff_lines, load_candidate, load_search_tree
from agentrl.workflow.store.run_resources import VersionOrigin
from agentrl.workflow.store.search_rounds import PlannedGroup
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.trajectory import Message, Task
from tests.support.played_runs import claim, claim_training, fail, finish, play, start, submission, value, values

SEED = {"prompt": "Solve {question}.", "tone": "Be kind."}
BETTER = {"prompt": "Solve {question} step by step.", "tone": "Be kind."}


def search_of(name: str = "first") -> Submission:
    """A search with one task of each role."""
    wanted = submission(name, tasks=3, kind="search")
    roles = dict(zip([task.content_hash for task in wanted.tasks], ("train", "choose", "held_out"), strict=True))
    return replace(wanted, config={**wanted.config, "resources": SEED}, roles=roles)


def begun(db: Database) -> IterationWork:
    """The search's first claim, when nothing is tried."""
    made = planning.submit(db, search_of())
    (iteration,) = planning.open_iterations(db, made.id)
    assert planning.start_iteration(db, iteration) == []
    return claim_training(db, iteration)


def planned(db: Database, work: IterationWork, role: str, *candidates: Any) -> list[PlannedGroup]:
    tasks = getattr(search_rounds.load_search_tasks(db, work.run_id), role)
    return [PlannedGroup(task, texts, VersionOrigin("an edit", SEED)) for texts in candidates for task in tasks]


def rolled_out(db: Database, work: IterationWork, rewards: tuple[float, ...]) -> IterationWork:
    for group, reward in zip(planning.start_iteration(db, work.id), rewards, strict=True):
        taken = claim(db, group)
        for position in range(len(taken.episodes)):
            finish(db, taken, position, reward)
    return claim_training(db, work.id)


def test_search_rows_record_rounds_and_mark_choice(database: Database) -> None:
    work = begun(database)
    search_rounds.add_round(database, work, planned(database, work, "choose", SEED, BETTER))
    with pytest.raises(Fenced):  # the claim ended with the round
        search_rounds.add_round(database, work, planned(database, work, "choose", SEED))
    work = rolled_out(database, work, (0.25, 0.75))
    assert search_rounds.load_candidates(database, work.id) == {0: SEED, 1: BETTER}
    search_rounds.add_round(database, work, planned(database, work, "held_out", SEED, BETTER))
    work = rolled_out(database, work, (0.0, 1.0))
    assert [group.slot for group in work.groups] == [0, 1, 2, 3]
    search_rounds.finish_search(database, work, BETTER)
    with pytest.raises(Fenced):
        search_rounds.finish_search(database, work, SEED)
    rows = list_resources(database, ResourceFilter("first")).rows
    told = {(row.name, row.version, row.parent_version, row.chosen, row.choose_reward, row.episodes_done) for row in rows}
    assert told == {("prompt", 0, None, False, 0.25, 4), ("prompt", 1, 0, True, 0.75, 4), ("tone", 0, None, True, 0.5, 8)}
    tree = load_search_tree(database, "first")
    assert tree.sentences == "The best version (prompt @1) solves 1 of 1 held-out task; the first solved 0."
    assert (tree.gain_on, tree.gain and (tree.gain.first, tree.gain.second)) == ("held_out", (0.0, 1.0))
    assert values(database, "SELECT status FROM runs") == ["done"]
    assert values(database, "SELECT detail FROM events WHERE kind = 'chosen'") == ["prompt@1, tone@0"]
    assert set(values(database, "SELECT fate FROM v_ledger")) == {"searched"}
    assert (
        value(database, "SELECT count(*) FROM v_episode_resources WHERE name = 'prompt' AND version = 1 AND role = 'choose'")
        == 2
    )


BOTH = {"prompt": "Solve {question} step by step.", "tone": "Be brief."}
SHORT = {"prompt": "Solve {question}.", "tone": "Be brief."}


def add_and_roll_out(db: Database, work: IterationWork, *trials: tuple[Any, Any, float]) -> IterationWork:
    """Tries texts on the task for choosing: (texts, those from which they were made, reward)."""
    (task,) = search_rounds.load_search_tasks(db, work.run_id).choose
    groups = [PlannedGroup(task, texts, VersionOrigin(f"edit {n}", before)) for n, (texts, before, _) in enumerate(trials)]
    search_rounds.add_round(db, work, groups)
    return rolled_out(db, work, tuple(reward for *_, reward in trials))


def test_search_tree_has_candidates_with_parents_and_scores(database: Database) -> None:
    work = begun(database)
    assert load_search_tree(database, "first").sentences == "No version has been tried yet."
    work = add_and_roll_out(database, work, (SEED, None, 0.25))
    open_tree = load_search_tree(database, "1")
    assert open_tree.sentences == "No other version has been tried yet. The first scores 0.25 on 1 task for choosing."
    work = add_and_roll_out(database, work, (BETTER, SEED, 0.5), (SHORT, SEED, 0.25))
    work = add_and_roll_out(database, work, (BOTH, BETTER, 0.75), (SEED, None, 0.75))
    tree = load_search_tree(database, "first")
    assert [(one.label, one.parent, one.score("choose"), one.on_path) for one in tree.candidates] == [
        ("prompt @0, tone @0", None, (0.5, 1), True),
        ("prompt @1", 0, (0.5, 1), True),
        ("tone @1", 0, (0.25, 1), False),
        ("tone @1", 1, (0.75, 1), True),
    ]
    assert [one.note for one in tree.candidates] == ["edit 0", "edit 0", "edit 1", ""]
    added = ["Solve {question}.", "... step by step.", "... brief.", "... brief."]
    assert [one.difference for one in tree.candidates] == added
    assert tree.sentences == (
        "So far, the best version (tone @1) scores 0.75 on 1 task for choosing; the first scored 0.5. "
        "Held-out tasks are measured at the end."
    )
    origin = load_candidate(database, "first", 1)
    assert [(one.name, one.version, one.parent_text, one.text) for one in origin.texts] == [
        ("prompt", 1, SEED["prompt"], BETTER["prompt"])
    ]
    groups = [one.group for one in tree.candidates]
    listed = [
        episode_rows.list_episodes(database, episode_rows.EpisodeFilter("first", texts_of=group)).rows for group in groups
    ]
    assert [len(rows) for rows in listed] == [one.episodes for one in tree.candidates] == [4, 2, 2, 2]
    search_rounds.finish_search(database, work, SEED)
    ended = load_search_tree(database, "first")
    assert [one.is_best for one in ended.candidates] == [True, False, False, False]
    assert (
        ended.sentences
        == "None of the 3 other versions was better than the first. The first scores 0.5 on 1 task for choosing."
    )
    with pytest.raises(NotFoundError, match="has no candidate 4"):
        load_candidate(database, "first", 4)


def test_search_tree_has_choice_without_trial(database: Database) -> None:
    work = add_and_roll_out(database, begun(database), (SEED, None, 0.25))
    search_rounds.finish_search(database, work, BETTER)
    tree = load_search_tree(database, "first")
    assert [(one.status, one.is_best, one.group is None) for one in tree.candidates] == [
        ("tried", False, False),
        ("untried", True, True),
    ]
    assert tree.sentences.startswith("The search chose tone @0, prompt @1, which was not measured")
    assert {one.text for one in load_candidate(database, "first", 1).texts} == {*BETTER.values()}


def test_search_without_trial_has_no_candidates(database: Database) -> None:
    begun(database)
    with pytest.raises(NotFoundError, match=r"first has no candidate 0\. List its texts: agentrl prompts first"):
        load_candidate(database, "first", 0)


def test_search_tree_refuses_run_that_is_no_search(database: Database) -> None:
    start(database, submission("trained"))
    with pytest.raises(NotFoundError, match="trained is not a prompt search"):
        load_search_tree(database, "trained")


def test_search_tree_counts_failed_episode_as_nothing(database: Database) -> None:
    work = begun(database)
    (task,) = search_rounds.load_search_tasks(database, work.run_id).choose
    search_rounds.add_round(database, work, [PlannedGroup(task, SEED, VersionOrigin("the beginning"))])
    (group,) = planning.start_iteration(database, work.id)
    taken = claim(database, group)
    finish(database, taken, 0, 1.0)
    fail(database, taken, 1)
    (only,) = load_search_tree(database, "first").candidates
    assert (only.status, only.score("choose")) == ("tried", (0.5, 1))


def test_search_tree_finds_what_critic_said(database: Database) -> None:
    work = add_and_roll_out(database, begun(database), (SEED, None, 0.0))
    critique = "It does not think step by step."
    edit = f"Here: <prompt>\n{BETTER['prompt']}\n</prompt>"
    request = f"<critique>{critique}</critique>"
    said = {"a": ("Criticise.", "It"), "b": ("Criticise.", critique), "c": (request, edit), "d": ("?", edit[:9])}
    for key, (prompt, answer) in said.items():
        search_rounds.record_answer(database, work.run_id, "m", key, [{"role": "user", "content": prompt}], answer, 0.5)
    add_and_roll_out(database, work, (BETTER, SEED, 1.0))
    origin = load_candidate(database, "first", 1)
    assert [row["answer"] for row in origin.critic] == [edit, critique]
    assert origin.critic[0]["messages"] == request
    assert load_candidate(database, "first", 0).critic == []


def test_search_tree_bounds_what_it_compares_and_searches(database: Database) -> None:
    before, after = ("\n".join(f"{'ab' * 30}{number % 7}" for number in range(start, start + 9000)) for start in (0, 3))
    began = time.process_time()
    lines = diff_lines(before, f"\x1b[31m{after}")
    assert time.process_time() - began < 2
    assert lines[-1] == f"... {9000 - MAX_DIFF_LINES} more lines not compared"
    assert "\x1b" not in "".join(lines)
    long = {**SEED, "prompt": "{question}" + "ab" * 16_000}
    work = add_and_roll_out(database, begun(database), (SEED, None, 0.0))
    for number in range(30):
        asked = [{"role": "user", "content": "ab" * 200_000}]
        search_rounds.record_answer(database, work.run_id, "m", str(number), asked, "ab" * 50_000, 0.5)
    add_and_roll_out(database, work, (long, SEED, 1.0))
    began = time.process_time()
    assert load_candidate(database, "first", 1).critic == []
    assert time.process_time() - began < 5


def test_search_rows_of_repeated_task_have_other_draws(database: Database) -> None:
    work = begun(database)
    search_rounds.add_round(database, work, planned(database, work, "choose", SEED, BETTER))
    work = rolled_out(database, work, (0.0, 0.0))
    search_rounds.add_round(database, work, planned(database, work, "choose", SEED))
    assert values(database, "SELECT sample FROM episodes ORDER BY id") == [0, 1, 2, 3, 4, 5]
    assert value(database, "SELECT episodes FROM iterations") == 6


def test_search_rows_keep_first_answer_of_critic(database: Database) -> None:
    work = begun(database)
    asked = [{"role": "user", "content": "Better?\0"}]
    said = [search_rounds.record_answer(database, work.run_id, "m", "k", asked, text, 0.5) for text in ("one\0", "two")]
    assert said[0] == said[1]
    assert "\0" not in said[0]
    assert search_rounds.load_answers(database, work.run_id) == {"k": said[0]}
    (row,) = list_critic_calls(database, CriticCallFilter("first")).rows
    assert (row.model, row.answer, row.messages[0]["role"], row.seconds) == ("m", said[0], "user", 0.5)


def test_run_uses_its_resources_and_fork_those_of_parent(database: Database) -> None:
    wanted = submission()
    group, other = start(database, replace(wanted, config={**wanted.config, "resources": SEED}))
    assert claim(database, group).resources == SEED
    play(database, other)
    assert value(database, "SELECT count(*) FROM resources") == 2
    (episode, *_) = episode_rows.list_episodes(database, episode_rows.EpisodeFilter("first", status="done")).rows
    fork = submission("forked", kind="fork")
    made = planning.submit(
        database,
        replace(
            fork,
            config={**fork.config, "resources": SEED},
            fork=planning.Fork(episode.id, 0),
            tasks=(),
        ),
    )
    (forked,) = planning.start_iteration(database, planning.open_iterations(database, made.id)[0])
    assert claim(database, forked).resources == SEED
    assert value(database, "SELECT count(*) FROM resources") == 2


def test_run_without_resources_has_no_rows_of_them(database: Database) -> None:
    group, *_ = start(database, submission())
    assert claim(database, group).resources == {}
    assert value(database, "SELECT count(*) FROM group_resources") == 0


# which tasks are for what

TASKS = [Task(f"t/{number}", (Message("user", str(number)),), "") for number in range(20)]


def config_of(**values: Any) -> RunConfig:
    return build({"algorithm.name": "apo", "search.choose_tasks": 4, "search.held_out_tasks": 6, **values})


def test_divide_gives_each_task_one_role() -> None:
    found = divide(config_of(), TASKS)
    assert sorted(task.key for task in found.tasks) == sorted(task.key for task in TASKS)
    assert sorted(found.roles.values()) == ["choose"] * 4 + ["held_out"] * 6
    assert divide(config_of(), TASKS[::-1]).roles == found.roles
    assert divide(config_of(seed=1), TASKS).roles != found.roles
    assert divide(config_of(**{"algorithm.name": "fast"}), TASKS).roles == {}


def test_divide_takes_named_held_out_tasks_from_others() -> None:
    from agentrl.workflow.config import DatasetConfig
    from agentrl.workflow.datasets import load_tasks

    tasks = load_tasks(DatasetConfig(name="arithmetic", max_tasks=30)).tasks
    named = {
        "eval.every": 1,
        "eval.dataset": "arithmetic",
        "eval.split": "train",
        "eval.tasks": 10,
        "dataset.name": "arithmetic",
    }
    found = divide(config_of(**named), tasks)
    assert (len(found.tasks), list(found.roles.values()).count("held_out")) == (30, 10)


@pytest.mark.parametrize(
    ("values", "tasks", "said"),
    [
        ({}, 10, "10 tasks are too few: 4 for selection, 6 held out, and the rest for edits"),
        ({"algorithm.name": "fast", "eval.every": 1}, 10, "fast has no evaluation"),
    ],
)
def test_divide_refuses_too_few_tasks(values: Any, tasks: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        divide(config_of(**values), TASKS[:tasks])
    assert said in str(caught.value)


def test_policy_of_search_run_has_chosen_texts(own_database: Database) -> None:
    wanted, texts = search_of(), {"system_prompt": "First.", "tool:calculator": "Adds."}
    config = {**wanted.config, "env": "arithmetic", "resources": texts}
    made = planning.submit(own_database, replace(wanted, config=config))
    (iteration,) = planning.open_iterations(own_database, made.id)
    planning.start_iteration(own_database, iteration)
    work, better = claim_training(own_database, iteration), {**texts, "system_prompt": "Best."}
    assert find_policy("first")[0].resources == texts
    search_rounds.add_round(own_database, work, planned(own_database, work, "choose", texts, better))
    search_rounds.finish_search(own_database, rolled_out(own_database, work, (0.25, 0.75)), better)
    config, ref = find_policy("1@0")
    assert (config.resources, ref.version) == (better, 0)
    env, tools = _env_at_hand(config, None)
    assert env.system_prompt == "Best."
    assert tools["calculator"].schema["function"]["description"] == "Adds."
    assert _env_at_hand(config, "arithmetic")[0].system_prompt not in ("First.", "Best.")
    assert eval_run_of("first", "arithmetic", None, 1, {})[0].resources == better
