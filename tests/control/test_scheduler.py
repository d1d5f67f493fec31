"""plan() sends what is missing and nothing else, decided from a snapshot alone; no run starves another."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.control.scheduler import (
    MAX_DOUBLINGS,
    MAX_HEADER,
    Action,
    Dispatch,
    SendRollouts,
    SendTrain,
    plan,
    split_into_headers,
)
from agentrl.workflow.control.snapshot import Claim, GroupState, IterationState, RunSnapshot, Snapshot
from agentrl.workflow.store import control_reads, planning, train_commits
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import claim_training, play, submission, update_of

LEASE = 30.0
NEVER = Claim(held=False, expired_ago=None, sent_ago=None, sends=0)
HELD = Claim(held=True, expired_ago=None, sent_ago=5.0, sends=1)


def sent(ago: float, sends: int = 1, expired_ago: float | None = None) -> Claim:
    return Claim(held=False, expired_ago=expired_ago, sent_ago=ago, sends=sends)


def world(*claims: Claim, train: Claim = NEVER, group_seconds: float = 0.0) -> Snapshot:
    groups = tuple(GroupState(number, claim) for number, claim in enumerate(claims, start=1))
    return Snapshot((RunSnapshot(1, "run", (IterationState(7, 0, groups, train),), group_seconds),), LEASE)


def test_plan_sends_new_iteration_as_one_chord() -> None:
    assert plan(world(NEVER, NEVER)) == [Dispatch(7, (1, 2))]


def test_plan_does_not_send_chord_again_whose_mark_was_skipped() -> None:
    """Its only open group was claimed, and its row locked, while the chord's send was marked."""
    assert plan(world(replace(HELD, sent_ago=None, sends=0))) == []
    assert plan(world(replace(NEVER, expired_ago=1.0))) == [SendRollouts((1,))], "and then its worker was lost"


def test_plan_trains_iteration_with_terminal_groups() -> None:
    assert plan(world()) == [SendTrain(7)]


def test_plan_holds_overlapping_iteration_until_its_policy() -> None:
    (run,) = world().runs
    early = replace(run, iterations=(replace(run.iterations[0], published=False),))
    assert plan(Snapshot((early,), LEASE)) == []


def test_plan_leaves_sent_or_running_train_job() -> None:
    assert plan(world(train=sent(1.0))) == []
    assert plan(world(train=HELD)) == []


def test_plan_replaces_trainer_after_lease() -> None:
    assert plan(world(train=sent(40.0, expired_ago=1.0))) == [SendTrain(7)]


def test_plan_leaves_held_or_queued_group() -> None:
    assert plan(world(HELD, sent(10.0))) == []


def test_plan_resends_group_of_lost_worker_at_once() -> None:
    assert plan(world(HELD, sent(31.0, expired_ago=0.5))) == [SendRollouts((2,))]


def test_plan_resends_at_once_after_clock_was_set_back() -> None:
    assert plan(world(HELD, sent(-3600.0))) == [SendRollouts((2,))]
    assert plan(world(replace(HELD, sent_ago=-3600.0))) == []
    assert plan(world(train=sent(-0.1))) == [SendTrain(7)]


def test_plan_resends_lost_message_after_two_leases() -> None:
    assert plan(world(HELD, sent(2 * LEASE))) == []
    assert plan(world(HELD, sent(2 * LEASE + 1))) == [SendRollouts((2,))]


def test_plan_waits_longer_for_slow_groups() -> None:
    assert plan(world(HELD, sent(150.0), group_seconds=100.0)) == []
    assert plan(world(HELD, sent(201.0), group_seconds=100.0)) == [SendRollouts((2,))]


def test_plan_doubles_wait_after_each_send_up_to_limit() -> None:
    assert plan(world(HELD, sent(4 * LEASE, sends=2))) == []
    assert plan(world(HELD, sent(4 * LEASE + 1, sends=2))) == [SendRollouts((2,))]
    longest = 2 * LEASE * 2**MAX_DOUBLINGS
    assert plan(world(HELD, sent(longest, sends=1000))) == []
    assert plan(world(HELD, sent(longest + 1, sends=1000))) == [SendRollouts((2,))]


seconds = st.floats(0, 1e5)
claims = st.builds(
    lambda held, expired, ago, sends: Claim(held, None if held else expired, ago if sends else None, sends),
    st.booleans(),
    st.none() | seconds,
    st.floats(-1e5, 1e5),  # negative: the clock was set back
    st.integers(0, 20),
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any state of up to three runs; ids are unique, as the database makes them."""
    ids = iter(range(1, 1000))
    runs = []
    for _ in range(draw(st.integers(0, 3))):
        iterations = tuple(
            IterationState(
                next(ids),
                number,
                tuple(GroupState(next(ids), draw(claims)) for _ in range(draw(st.integers(0, 4)))),
                draw(claims),
                published=number == 0 or draw(st.booleans()),
            )
            for number in range(draw(st.integers(0, 2)))
        )
        runs.append(RunSnapshot(next(ids), "run", iterations, draw(st.floats(0, 1000))))
    return Snapshot(tuple(runs), draw(st.floats(0.1, 100)))


def after(snapshot: Snapshot, actions: list[Action]) -> Snapshot:
    """The same moment with the messages of `actions` sent and written to their rows."""
    trains = {action.iteration for action in actions if isinstance(action, SendTrain)}
    groups = {group for action in actions if not isinstance(action, SendTrain) for group in action.groups}

    def sent_now(claim: Claim) -> Claim:
        return replace(claim, sent_ago=0.0, sends=claim.sends + 1)

    def moved(iteration: IterationState) -> IterationState:
        members = tuple(replace(g, claim=sent_now(g.claim)) if g.id in groups else g for g in iteration.groups)
        train = sent_now(iteration.train) if iteration.id in trains else iteration.train
        return replace(iteration, groups=members, train=train)

    runs = tuple(replace(run, iterations=tuple(map(moved, run.iterations))) for run in snapshot.runs)
    return replace(snapshot, runs=runs)


@given(snapshots())
def test_plan_is_empty_after_it_was_carried_out(snapshot: Snapshot) -> None:
    assert plan(after(snapshot, plan(snapshot))) == []


@given(snapshots())
def test_plan_sends_no_row_twice(snapshot: Snapshot) -> None:
    actions = plan(snapshot)
    groups = [group for action in actions if not isinstance(action, SendTrain) for group in action.groups]
    trains = [action.iteration for action in actions if isinstance(action, SendTrain)]
    assert len(groups) == len(set(groups))
    assert len(trains) == len(set(trains))


@given(snapshots())
def test_plan_sends_every_unheld_row_eventually(snapshot: Snapshot) -> None:
    def waited(claim: Claim) -> Claim:
        return replace(claim, sent_ago=None if claim.sent_ago is None else 1e9)

    iterations = [
        replace(i, train=waited(i.train), groups=tuple(replace(g, claim=waited(g.claim)) for g in i.groups))
        for run in snapshot.runs
        for i in run.iterations
    ]
    late = replace(snapshot, runs=tuple(RunSnapshot(i.id, "run", (i,), 1.0) for i in iterations))
    actions = plan(late)
    reached = {group for action in actions if not isinstance(action, SendTrain) for group in action.groups}
    trained = {action.iteration for action in actions if isinstance(action, SendTrain)}
    for iteration in iterations:
        assert {group.id for group in iteration.groups if not group.claim.held} <= reached
        assert (iteration.id in trained) == (iteration.is_ready and not iteration.train.held)


@given(st.integers(0, 1000))
def test_plan_headers_hold_each_group_once_in_128_jobs(number: int) -> None:
    parts = split_into_headers(tuple(range(number)))
    assert [group for part in parts for group in part] == list(range(number))
    assert len(parts) <= MAX_HEADER
    assert all(parts)


def test_plan_gives_small_run_its_turn_beside_big_one(sqlite: Database) -> None:
    """One queue of rollouts, taken in order by four workers at a time, and one of updates, as Celery has them."""
    planning.submit(sqlite, submission("big", tasks=16, epochs=6, tasks_per_iteration=16))
    planning.submit(sqlite, submission("small", tasks=1, epochs=3, seed=1))
    queue: list[tuple[str, tuple[int, ...]]] = []
    ended: list[str] = []
    while control_reads.count_running_runs(sqlite):
        for action in plan(control_reads.snapshot(sqlite, LEASE)):
            if isinstance(action, Dispatch):
                groups = planning.start_iteration(sqlite, action.iteration)
                queue += [("rollout", tuple(part)) for part in split_into_headers(tuple(groups))]
                planning.mark_groups_sent(sqlite, groups)
            elif isinstance(action, SendTrain):
                queue.append(("train", (action.iteration,)))
                planning.mark_train_sent(sqlite, action.iteration)
        for kind, ids in [queue.pop(0) for _ in queue[:4]]:
            if kind == "rollout":
                for group in ids:
                    play(sqlite, group)
            else:
                work = claim_training(sqlite, ids[0])
                train_commits.commit_update(sqlite, work, update_of(work), 3)
                ended.append(work.run)
    turns = "".join(name[0] for name in ended)
    assert turns.count("b") == 6
    assert turns.count("s") == 3
    assert "bbb" not in turns[: turns.rindex("s")], "it never waits for more than what stood before it"
