"""What people, workers and the control loop read of a grown database: every command that reads, every view, every claim.

`pages` and `loads` are of a page, an episode or an iteration, and their work must not grow with what is stored; that of
`lists` may grow with the run that is listed, and that of `sums` grows with the rows that are counted.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import select, text

from agentrl.workers.requests import run_verdict
from agentrl.workflow.store import (
    blocked_runs,
    control_reads,
    evals,
    forks,
    leases,
    repair,
    retention,
    reward_sets,
    rollout_claims,
    run_names,
    tool_calls,
    tool_sessions,
    train_commits,
    training_groups,
)
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import open_iterations
from agentrl.workflow.store.reads import (
    changes,
    episode_rows,
    eval_results,
    event_rows,
    group_rows,
    iteration_changes,
    iteration_rows,
    ledger,
    open_work,
    provenance,
    run_rows,
    run_seconds,
)
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.reads.eval_results import EvalFilter
from agentrl.workflow.store.reads.event_rows import EventFilter
from agentrl.workflow.store.reads.group_rows import GroupFilter
from agentrl.workflow.store.reads.iteration_rows import IterationFilter, UpdateFilter
from agentrl.workflow.store.reads.paging import MAX_SIZE, Page, Paging
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.views import VIEWS
from agentrl.workflow.trajectory import PolicyRef
from bench.performance.synthetic import PER_ITERATION, TASKS_PER_ITERATION, Run

Read = Callable[[Database], object]
FILTERS: tuple[dict[str, object], ...] = (
    {},
    {"iteration": 1},
    {"status": "failed"},
    {"status": "done"},
    {"stop_reason": "max_tokens"},
    {"task": "train/3"},
    {"min_reward": 1.0},
    {"max_reward": 0.0},
    {"tool_errors": 1},
    {"tool_errors": 2},
    {"status": "done", "stop_reason": "max_tokens", "min_reward": 1.0, "tool_errors": 1},
    {"iteration": 1, "task": "train/3", "max_reward": 0.5},
)
"""Every filter of `list_episodes` alone, some that nothing meets, some together."""

QUERIES = Path(__file__).parents[2] / "docs/queries.md"
LEASE = 30.0
FIRST, WHOLE = Paging(20), Paging(MAX_SIZE)
"""A page as it comes, and a whole list."""

WITHOUT_IDS = ("v_ledger", "v_tool_sessions", "v_episode_resources")
"""An episode stands in the first once for each run that trained on it; a session is its episode's."""

OF_NO_RUN = ("v_machine",)
"""Views of what is no run's. They have neither a run nor an id."""

OF_RUN = {"v_evals": "measures"}
"""View -> the column that names the run, where it is not `run`: that of an evaluation is the evaluation."""

OF_EPISODE = ("v_steps", "v_tool_calls", "v_tool_sessions", "v_rewards", "v_ledger")
"""Views with a column `episode_id`."""

LISTED = ("v_runs", "v_iterations", "v_updates", "v_evals", "v_resources", "v_critic_calls")
"""Views whose rows are runs, stand for an iteration, or were made once in many episodes."""


def reads(runs: list[Run], episodes: int) -> dict[str, Read]:
    """Name -> what is shown: of the whole database, then of each run.

    Args:
        episodes: how many there are, in all.
    """
    found = whole_database() | pages(1) | pages(episodes // 2)
    for run in runs:
        found |= pages_of(run) | lists(run)
    return found


def whole_database() -> dict[str, Read]:
    """Name -> what is read of all runs, or of none."""
    found: dict[str, Read] = {
        "list_runs": run_rows.list_runs,
        "last episode": episode_rows.find_last_episode,
        "list_open_work": open_work.list_open_work,
        "run names": lambda database: run_rows.list_run_names(database, "l", 100),
        "snapshot": lambda database: control_reads.snapshot(database, LEASE),
        "unfinished_runs": control_reads.count_running_runs,
        "some_run_overlaps": control_reads.some_run_overlaps,
        "service_holder": lambda database: leases.service_holder(database, "control"),
        "lost_calls": rolled_back(tool_calls.lost_calls, 5),
        "keep sessions": rolled_back(tool_sessions.keep, "nobody", LEASE),
        "measured_datasets": eval_results.list_measured_datasets,
        "policy_at": lambda database: run_names.find_policy_at(database, "runs/none/v1"),
        "gc: checkpoints": retention.list_checkpoint_folders,
    }
    for view in VIEWS:
        found[f"of no run: {view}"] = _query(f"SELECT * FROM {view} LIMIT 50")
        if view not in (*WITHOUT_IDS, *OF_NO_RUN):
            found[f"of no run: {view}, newest"] = _query(f"SELECT * FROM {view} ORDER BY id DESC LIMIT 50")
    return found


def pages(episode: int) -> dict[str, Read]:
    """Name -> what is read of an episode: `replay`, `replay --verify`, `fork`, the views that know episodes."""
    found: dict[str, Read] = {
        f"episode {episode}: find_episode": lambda database: episode_rows.find_episode(database, episode),
        f"episode {episode}: find_origin": lambda database: provenance.find_origin(database, episode),
        f"episode {episode}: fork_point": lambda database: forks.load_fork_point(database, episode, 1),
        f"episode {episode}: chosen": lambda database: training_groups.load_chosen_episodes(database, [episode]),
        f"episode {episode}: call": lambda database: tool_calls.find_call(database, 3 * episode),
    }
    for view in OF_EPISODE:
        found[f"episode {episode}: {view}"] = _query(f"SELECT * FROM {view} WHERE episode_id = {episode}")
    return found


def pages_of(run: Run) -> dict[str, Read]:
    """Name -> what is read of a run by people, its workers and the control loop, a page or an iteration at a time."""
    name = run.name
    found: dict[str, Read] = {
        "progress": lambda database: run_rows.count_progress(database, name),
        "sampled_on": lambda database: run_rows.why_sampling_on(database, name),
        "waits_for": lambda database: blocked_runs.find_wait_reason(database, run.id),
        "list_iterations, new": _list(iteration_rows.list_iterations, IterationFilter(name, after=run.iterations - 1)),
        "mark_changes": lambda database: changes.mark_changes(database, name),
        "list_episodes, changed": lambda database: _changed(database, name),
        "list_groups": _list(group_rows.list_groups, GroupFilter(name)),
        "list_groups, iteration=1": _list(group_rows.list_groups, GroupFilter(name, iteration=1)),
        "list_episodes, of a group": _page(name, {"group": 2}),
        "waiting_evals": lambda database: evals.list_open_evals(database, run.id),
        "find_policy": lambda database: run_names.find_policy(database, name, None),
        "find_policy, best": lambda database: run_names.find_policy(database, name, "best"),
        "open_iterations": lambda database: open_iterations(database, run.id),
        "optimizer_to_drop": lambda database: train_commits.find_optimizer_to_drop(database, run.id),
        "claim a group": lambda database: _claim_group(database, run.id),
        **_of_eval(f"{name}-eval-0"),
    }
    for filters in ({}, {"iteration": 1}, {"min_reward": 1.0}):
        found[_shown(filters)] = _page(name, filters)
    for view in VIEWS:
        found |= {} if view in (*LISTED, *OF_NO_RUN) else _view(view, name)
    return {f"{name}: {what}": read for what, read in found.items()}


def loads(run: Run) -> dict[str, Read]:
    """Name -> what loads an iteration's episodes, or 500, with every step and token."""
    return {
        f"{run.name}: what an update reads": lambda database: _load(database, run.id),
        f"{run.name}: whatif": lambda database: provenance.load_update_inputs(database, run.name, None),
        f"{run.name}: rescore, 500 episodes": lambda database: next(reward_sets.iterate_done_episodes(database, run.id)),
    }


def lists(run: Run) -> dict[str, Read]:
    """Name -> what passes over the run's iterations, its versions, or the episodes that do not meet a filter."""
    name, last = run.name, run.iterations * PER_ITERATION - 51
    found: dict[str, Read] = {
        "describe_run": lambda database: run_rows.describe_run(database, name),
        "list_iterations": _list(iteration_rows.list_iterations, IterationFilter(name), WHOLE),
        "list_iterations, page": _list(iteration_rows.list_iterations, IterationFilter(name)),
        "list_updates": _list(iteration_rows.list_updates, UpdateFilter(name)),
        "list_evals": _list(eval_results.list_evals, EvalFilter(name), WHOLE),
        "list_events": _list(event_rows.list_events, EventFilter(name), WHOLE),
        "list_events, page": _list(event_rows.list_events, EventFilter(name)),
        "list_groups, flat": _list(group_rows.list_groups, GroupFilter(name), Paging(sort="deviation")),
        "list_fates": lambda database: ledger.list_fates(database, name, 1),
        "list_episodes, last page": _page(name, {}, offset=last),
        "list_episodes, best": _page(name, {}, sort="-reward"),
        "list_episodes, advantage": _page(name, {}, sort="-advantage"),
        "list_episodes, text": _page(name, {"text": "4_2%"}),
        "versions_before": lambda database: repair.list_versions_before(database, run.id, run.published),
    }
    found |= {_shown(filters): _page(name, filters) for filters in FILTERS}
    for view in LISTED:
        found |= _view(view, name)
    return {f"{name}: {what}": read for what, read in found.items()}


def _shown(filters: Mapping[str, object]) -> str:
    return " ".join(["list_episodes", *(f"{key}={value}" for key, value in filters.items())])


def _view(view: str, run: str) -> dict[str, Read]:
    """A page of the view, any and the newest rows."""
    chosen = f"SELECT * FROM {view} WHERE {OF_RUN.get(view, 'run')} = '{run}'"
    found = {view: _query(f"{chosen} LIMIT 50")}
    if view not in WITHOUT_IDS:
        found[f"{view}, newest"] = _query(f"{chosen} ORDER BY id DESC LIMIT 50")
    return found


def _of_eval(name: str) -> dict[str, Read]:
    """`compare` and `eval`."""

    def of_run(query: Callable[[Database, int], object]) -> Read:
        return lambda database: query(database, run_names.find_run(database, name)["id"])

    return {
        "evaluation": lambda database: eval_results.find_result(database, name),
        "find_evals": lambda database: eval_results.find_evals(database, name),
        "evals_of_policy": lambda database: eval_results.find_evals_of_policy(database, PolicyRef("tiny", "b" * 64)),
        "task_means": of_run(eval_results.load_task_means),
        "done_episodes": of_run(eval_results.load_done_episodes),
        "right_episodes": lambda database: eval_results.find_right_episodes(
            database, eval_results.find_evals(database, name)[0]["iteration"]
        ),
    }


def sums(run: Run) -> dict[str, Read]:
    """Name -> what counts over all of the run, or over all runs: `why`, `gc`, `submit --from-groups`, every view."""
    episode = max(1, run.iterations * PER_ITERATION // 2)
    found: dict[str, Read] = {
        "why": lambda database: ledger.explain_fate(database, episode),
        "verdict": lambda database: run_verdict.judge_run(database, run.name),
        "reward_extremes": lambda database: iteration_changes.load_reward_extremes(database, run.name),
        "seconds": lambda database: run_seconds.load_run_seconds(database, run.name),
        "most_frequent_failure": lambda database: run_rows.find_most_frequent_failure(database, run.name),
        "gc: needs": lambda database: retention.find_needs(database, run.id, {f"v{n}" for n in range(run.published)}, None),
        "stored_run": lambda database: forks.load_stored_run(database, run.id, (), "default", 2),
        "stored_run, rescored": lambda database: forks.load_stored_run(database, run.id, (), _newest_set(database, run.id), 2),
        "counted_twice": lambda database: forks.find_episode_counted_twice(
            database, range(1, run.iterations * TASKS_PER_ITERATION)
        ),
        "candidates": lambda database: training_groups.load_candidates(database, run.id, range(1, 100), "default"),
    }
    for view in (view for view in VIEWS if view not in OF_NO_RUN):
        found[f"count {view}"] = _query(f"SELECT count(*) FROM {view} WHERE {OF_RUN.get(view, 'run')} = '{run.name}'")
        found[f"count {view} of all runs"] = _query(f"SELECT count(*) FROM {view}")
    found["fates"] = _query(f"SELECT fate, count(*) FROM v_ledger WHERE run = '{run.name}' GROUP BY fate")
    return found | questions(run.name)


def questions(run: str) -> dict[str, Read]:
    """The five queries of `docs/queries.md`, over all of a run."""
    shown = QUERIES.read_text().split("<!-- queries -->")[1].split("<!-- /queries -->")[0]
    queries = re.findall(r"```sql\n(.*?)```", shown, re.DOTALL)
    return {f"question {n}": _query(query.replace("quickstart", run)) for n, query in enumerate(queries, 1)}


def rolled_back(work: Any, *args: Any) -> Read:
    """What a transaction of the store reads and writes, undone."""

    def read(database: Database) -> object:
        with database.engine.connect() as connection, connection.begin() as begun:
            found: object = work.__wrapped__(connection, *args)
            begun.rollback()
            return found

    return read


def _claim_group(database: Database, run_id: int) -> object:
    """The run's newest group, free or not."""
    with database.read() as tx:
        newest = select(schema.groups.c.id).where(schema.groups.c.run_id == run_id).order_by(schema.groups.c.id.desc()).limit(1)
        group = tx.execute(newest).scalar_one()
    return rolled_back(rollout_claims.claim_group, group, "host:2/claim", LEASE)(database)


def _load(database: Database, run_id: int) -> object:
    """An iteration's episodes with all their tokens, as the train job loads them."""
    with database.read() as tx:
        first = (
            select(schema.iterations.c.id)
            .where(schema.iterations.c.run_id == run_id)
            .order_by(schema.iterations.c.number)
            .limit(1)
        )
        return training_groups.load_groups(tx, tx.execute(first).scalar_one(), "default")


def _newest_set(database: Database, run_id: int) -> str:
    with database.read() as tx:
        mine = select(schema.reward_sets.c.name).where(schema.reward_sets.c.run_id == run_id)
        return str(tx.execute(mine.order_by(schema.reward_sets.c.id.desc()).limit(1)).scalar_one())


def _page(run: str, filters: Mapping[str, Any], **paging: Any) -> Read:
    return _list(episode_rows.list_episodes, EpisodeFilter(run, **filters), Paging(**paging))


def _list(list_page: Callable[[Any, Any, Paging], Page[Any]], chosen: object, paging: Paging = FIRST) -> Read:
    """A page of a list, and the one after it."""

    def read(database: Database) -> object:
        page = list_page(database, chosen, paging)
        return page if not page.next else list_page(database, chosen, replace(paging, cursor=page.next, offset=0))

    return read


def _changed(database: Database, run: str) -> object:
    """The groups and episodes of a run that may have changed since now: those that are open."""
    now = changes.mark_changes(database, run)
    group_rows.list_groups(database, GroupFilter(run, since=now))
    return episode_rows.list_episodes(database, EpisodeFilter(run, since=now))


def _query(query: str) -> Read:
    def read(database: Database) -> object:
        with database.read() as tx:
            return tx.execute(text(query)).all()

    return read
