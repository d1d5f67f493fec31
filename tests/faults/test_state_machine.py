"""Two runs at once and all that can befall their messages, workers, tools, trainers, control loops and clocks, in any order.

The rollouts of the first go on during its updates, and where the groups of an iteration have no variance more are sampled;
those of the second wait for its updates, whatever they earn.
Only Redis and the model are played by hand: a bag of messages and turns made up on the spot. The rows, every query and the
plan are the real ones. After each rule the rows must keep their promises; in the end one healthy worker must bring both runs
to their end.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import select, text

from agentrl.workflow.control.scheduler import Dispatch, SendRollouts, SendTrain, plan, split_into_headers
from agentrl.workflow.errors import Fenced
from agentrl.workflow.stats.group_variance import choose_groups
from agentrl.workflow.store import (
    control_reads,
    leases,
    planning,
    rollout_claims,
    run_names,
    steps,
    tool_calls,
    train_claims,
    train_commits,
)
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.tool_calls import UNKNOWN_OUTCOME
from agentrl.workflow.store.train_claims import IterationWork, MoreGroupsPlanned
from agentrl.workflow.tables import schema as tables
from agentrl.workflow.tables.columns import now_ms
from agentrl.workflow.trajectory import TERMINAL, CallRecord, Episode, StepRecord
from bench.faults.invariants import GIVE_UP, check_complete, check_promises, dump
from tests.support.played_runs import CALL, answered, end, step, submission, update_of, value

LEASE = 30_000.0
"""So long that no lease expires while the test computes: time passes only where a rule says so."""

MAX_LEASES = 400
"""A plan waits for a message at most 128 leases, and for a lease of before the clock was set back at most ten."""

MAX_MOVES = 5000

ONCE = replace(CALL, effects="once")
RUNS = ("one", "two")

Letter = tuple[str, tuple[int, ...]]
"""A message: `rollout` of groups, `train` of an iteration or `call`."""

pick = st.integers(0, 63)
often = st.sampled_from([True, True, True, False])
seldom = st.sampled_from([False, False, False, True])
moves = st.integers(0, 12)
"""How long all goes well after a fault."""


@dataclass
class Roller:
    """A rollout worker with its claim and what it remembers."""

    work: GroupWork
    episodes: dict[int, Episode] = field(default_factory=dict)


@dataclass
class Trainer:
    """A train worker with its claim."""

    work: IterationWork


@dataclass
class Tool:
    """A tools worker that runs a call."""

    call: int
    worker: str


class World(RuleBasedStateMachine):
    """Everything that is not in the rows; see the module's text."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Database]]) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.db = self.stack.enter_context(opened())
        self.bag: list[Letter] = []
        self.delivered: list[Letter] = []
        self.rollers: list[Roller] = []
        self.trainers: list[Trainer] = []
        self.tools: list[Tool] = []
        self.ghosts: list[Roller | Trainer] = []
        self.started: Counter[int] = Counter()
        self.seen: dict[Any, Any] = {}
        self.number = count(1)
        planning.submit(self.db, submission("one", tasks=6, max_staleness=1, dynamic_sampling=2))
        planning.submit(self.db, submission("two", tasks=4, seed=1))

    # the broker

    @precondition(lambda self: self.bag)
    @rule(pick=pick)
    def a_message_overtakes_others(self, pick: int) -> None:
        self.deliver(self.bag.pop(pick % len(self.bag)))

    @precondition(lambda self: self.delivered)
    @rule(pick=pick, moves=moves)
    def a_message_comes_again(self, pick: int, moves: int) -> None:
        """At once, or long after its job has ended, since the acknowledgement was lost."""
        self.deliver(self.delivered[-1 - pick % len(self.delivered)])
        self.go_well(moves)

    def deliver(self, message: Letter) -> None:
        self.delivered.append(message)
        kind, ids = message
        if kind == "rollout":
            for group in ids:
                self.claim_group(group)
        elif kind == "train":
            self.claim_iteration(ids[0])
        else:
            self.take_call(ids[0])

    @precondition(lambda self: self.bag)
    @rule(pick=pick, everything=seldom, moves=moves)
    def redis_loses_a_message(self, pick: int, everything: bool, moves: int) -> None:
        self.bag.pop(pick % len(self.bag))
        if everything:
            self.bag.clear()
        self.go_well(moves)

    # rollouts

    def claim_group(self, group: int) -> None:
        free = self.is_free("groups", group)
        work = rollout_claims.claim_group(self.db, group, f"host:{next(self.number)}", LEASE)
        if work is None:
            return
        assert free, "two workers held one group"
        roller = Roller(work, {episode.id: episode for episode in work.episodes})
        self.rollers.append(roller)
        if work.run == "two":  # as an env that is not replayed
            for episode in [episode for episode in work.episodes if episode.steps]:
                steps.restart_episode(self.db, work.fence, episode.id)
                roller.episodes[episode.id] = replace(episode, steps=())

    @precondition(lambda self: self.rollers)
    @rule(pick=pick, fails=seldom, send=often, twice=seldom)
    def advance(self, pick: int, fails: bool, send: bool, twice: bool) -> None:
        """One episode of one worker goes on. `send`: and tells others; `twice`: the answer of its commit is lost."""
        self.go_on(self.rollers[pick % len(self.rollers)], pick, fails, send, twice)

    def go_on(self, roller: Roller, pick: int = 0, fails: bool = False, send: bool = True, twice: bool = False) -> bool:
        waiting = list(roller.episodes.values())
        episode = waiting[pick % len(waiting)]
        with self.fenced(roller):
            if not episode.steps:
                self.sample(roller, episode, (CALL, ONCE), send, twice)
            elif episode.steps[-1].pending:
                return self.observe(roller, episode, send, twice)
            elif len(episode.steps) == 1:
                self.sample(roller, episode, (), send, twice)
            else:
                self.finish(roller, episode, fails, send)
        return True

    def sample(self, roller: Roller, episode: Episode, made: tuple[CallRecord, ...], send: bool, twice: bool) -> None:
        turn = replace(step(len(episode.steps), made), sampled_ids=(next(self.number), 4))
        record = StepRecord(episode.id, turn, roller.work.policy_id, "42", made)
        (ids,) = steps.commit_sampled(self.db, roller.work.fence, [record])
        if twice:
            assert steps.commit_sampled(self.db, roller.work.fence, [record]) == [ids]
        roller.episodes[episode.id] = episode.with_step(turn)
        if send:
            self.bag += [("call", (call,)) for call in ids]

    def observe(self, roller: Roller, episode: Episode, send: bool, twice: bool) -> bool:
        last = episode.steps[-1]
        ids = steps.list_calls(self.db, episode.id, last.index)
        results = steps.load_results(self.db, ids)
        if len(results) < len(ids):  # only calls without a result are sent again
            self.bag += [("call", (call,)) for call in ids if send and call not in results]
            return False
        observed = replace(last, results=tuple(results[call] for call in ids))
        for _ in range(1 + twice):
            steps.commit_observed(self.db, roller.work.fence, [(episode.id, observed)])
        roller.episodes[episode.id] = episode.with_step(observed)
        return True

    def finish(self, roller: Roller, episode: Episode, fails: bool, send: bool) -> None:
        flat = roller.work.run == "one" and roller.work.fence.group % 3 == 0
        reward = float(episode.sample) * (not flat)
        done = Outcome(episode.id, "done", "answered", reward, {"numeric_answer": reward}, "42")
        outcome = Outcome(episode.id, "failed", error_class="RewardError", error="it raised") if fails else done
        ended = end(self.db, roller.work, outcome)
        del roller.episodes[episode.id]
        if not roller.episodes:
            self.rollers.remove(roller)
        dies_before_mark = not send and roller.work.fence.group % 2
        if ended.iteration is None or dies_before_mark:
            return
        if planning.mark_first_train_sent(self.db, ended.iteration) and send:
            self.send_train(ended.iteration, write=False)

    @precondition(lambda self: self.rollers)
    @rule(pick=pick, how=st.sampled_from(["dies", "dies", "fails", "hands back"]), moves=moves)
    def stop_a_rollout(self, pick: int, how: str, moves: int) -> None:
        roller = self.rollers.pop(pick % len(self.rollers))
        if how == "dies":
            self.ghosts.append(roller)
        with self.unchanged_if(self.overtaken(roller)):
            if how == "fails":
                rollout_claims.fail_attempt(self.db, roller.work.fence, "InfraError", "down", GIVE_UP)
            elif how == "hands back":
                rollout_claims.hand_back(self.db, roller.work.fence)
        self.go_well(moves)

    @precondition(lambda self: self.ghosts)
    @rule(pick=pick, moves=moves)
    def wake_a_zombie(self, pick: int, moves: int) -> None:
        """It goes on where it stood, whatever has happened meanwhile."""
        ghost = self.ghosts.pop(pick % len(self.ghosts))
        if isinstance(ghost, Roller):
            self.rollers.append(ghost)
            self.go_on(ghost)
        else:
            self.trainers.append(ghost)
            self.commit_of(ghost)
        self.go_well(moves)

    # tools

    def take_call(self, call: int) -> None:
        work, worker = tool_calls.find_call(self.db, call), f"tools:{next(self.number)}"
        if work is None:
            return
        if work.effects == "once":
            start = tool_calls.start_once(self.db, call, worker, LEASE)
            if start == "lost":
                tool_calls.record_result(self.db, call, UNKNOWN_OUTCOME, datetime.now(UTC), worker)
            if start != "ours":
                return
            self.started[call] += 1
            assert self.started[call] == 1, "a call with effects was started twice"
        self.tools.append(Tool(call, worker))

    @precondition(lambda self: self.tools)
    @rule(pick=pick, moves=moves)
    def a_tools_worker_dies(self, pick: int, moves: int) -> None:
        self.tools.pop(pick % len(self.tools))
        self.go_well(moves)

    @precondition(lambda self: self.tools)
    @rule(pick=pick)
    def end_a_call(self, pick: int) -> None:
        tool = self.tools.pop(pick % len(self.tools))
        before = value(self.db, "SELECT result FROM tool_calls WHERE id = :id", id=tool.call)
        result = answered(f"answer {next(self.number)}")
        counts = tool_calls.record_result(self.db, tool.call, result, datetime.now(UTC), tool.worker)
        assert counts == (before is None), "the first result counts, and no other"

    # training

    def claim_iteration(self, iteration: int) -> None:
        free = self.is_free("iterations", iteration)
        work = train_claims.claim_iteration(self.db, iteration, f"trainer:{next(self.number)}", LEASE)
        if work is None:
            return
        assert free, "two trainers held one iteration"
        if isinstance(work, MoreGroupsPlanned):
            if next(self.number) % 3:  # else who planned them dies before they are sent
                self.dispatch(iteration)
            return
        work = train_claims.load_work(self.db, work)
        assert work.policy.version == work.number, "an update starts from what the one before it published"
        episodes = [episode for group in work.groups for episode in group.episodes]
        assert [episode for episode in episodes if episode.status not in TERMINAL] == []
        assert len(episodes) == 2 * len(work.groups)
        self.trainers.append(Trainer(work))

    @precondition(lambda self: self.trainers)
    @rule(pick=pick, twice=seldom, send=often)
    def commit(self, pick: int, twice: bool, send: bool) -> None:
        self.commit_of(self.trainers[pick % len(self.trainers)], twice, send)

    def commit_of(self, trainer: Trainer, twice: bool = False, send: bool = True) -> None:
        work = trainer.work
        chosen, dropped = choose_groups(work.groups, work.max_groups) if work.max_groups else (work.groups, {})
        done = [e.id for group in chosen for e in group.episodes if e.trainable]
        name = f"out/{next(self.number)}"
        record = update_of(work, advantages=dict.fromkeys(done, 0.5), dropped=dropped, path=name, sha256=name)
        published = None
        with self.fenced(trainer):
            published = train_commits.commit_update(self.db, trainer.work, record, 3)
            assert published.version == trainer.work.number + 1
            if twice:
                assert train_commits.commit_update(self.db, trainer.work, record, 3) == published
            self.trainers.remove(trainer)
        if published is not None and published.trains is not None and send:
            self.send_train(published.trains)
        if published is not None and published.next_iteration is not None and send:
            self.dispatch(published.next_iteration)

    @precondition(lambda self: self.trainers)
    @rule(pick=pick, how=st.sampled_from(["dies", "fails", "hands back", "dies after the commit"]), moves=moves)
    def stop_a_training(self, pick: int, how: str, moves: int) -> None:
        trainer = self.trainers[pick % len(self.trainers)]
        if how == "dies after the commit":
            self.commit_of(trainer, send=False)
        else:
            self.trainers.remove(trainer)
        if how.startswith("dies"):
            self.ghosts.append(trainer)
        with self.unchanged_if(self.overtaken(trainer)):
            if how == "fails":
                train_claims.fail_update(self.db, trainer.work, "no memory", GIVE_UP)
            elif how == "hands back":
                train_claims.hand_back_iteration(self.db, trainer.work.id, trainer.work.token)
        self.go_well(moves)

    # control

    @rule(holder=st.sampled_from(["control:1", "control:2"]), fate=st.sampled_from(["well", "it dies", "Redis dies"]))
    def tick(self, holder: str, fate: str) -> None:
        """Sends what is missing, unless it dies before it can write that it did, or all messages are lost."""
        self.send_missing(holder, dies=fate == "it dies")
        if fate == "Redis dies":
            self.bag.clear()

    def send_missing(self, holder: str, dies: bool = False) -> bool:
        if not leases.take_service_lease(self.db, "control", holder, 0.3 * LEASE):
            return False
        actions = plan(control_reads.snapshot(self.db, LEASE))
        self.carry_out(actions, write=not dies)
        if not dies:
            assert plan(control_reads.snapshot(self.db, LEASE)) == [], "what was just sent is not sent again"
        return bool(actions)

    @rule()
    def two_control_loops_at_once(self) -> None:
        first, second = (plan(control_reads.snapshot(self.db, LEASE)) for _ in range(2))
        self.carry_out(first)
        self.carry_out(second)
        assert plan(control_reads.snapshot(self.db, LEASE)) == []

    def carry_out(self, actions: list[Any], write: bool = True) -> None:
        for action in actions:
            match action:
                case Dispatch(iteration, _):
                    self.dispatch(iteration, write)
                case SendRollouts(groups):
                    self.send_rollouts(groups, write)
                case SendTrain(iteration):
                    self.send_train(iteration, write)

    def dispatch(self, iteration: int, write: bool = True) -> None:
        groups = planning.start_iteration(self.db, iteration)
        self.send_rollouts(tuple(groups), write)
        self.bag.append(("train", (iteration,)))  # the chord's body, that may come at any time

    def send_rollouts(self, groups: tuple[int, ...], write: bool = True) -> None:
        self.bag += [("rollout", tuple(part)) for part in split_into_headers(groups)]
        if write:
            planning.mark_groups_sent(self.db, groups)

    def send_train(self, iteration: int, write: bool = True) -> None:
        self.bag.append(("train", (iteration,)))
        if write:
            planning.mark_train_sent(self.db, iteration)

    # time

    @rule(leases=st.sampled_from([1.03, -0.03, 0.37, 2.03, -1.03, 2880.0, -2880.0]), moves=moves)
    def the_clock_jumps(self, leases: float, moves: int) -> None:
        self.pass_time(leases * LEASE)
        self.go_well(moves)

    def pass_time(self, seconds: float) -> None:
        """On the database's clock, that is: all moments in the rows move the other way."""
        moved = {"groups": ["lease_until", "sent_ms"], "iterations": ["lease_until", "train_sent_ms"]}
        with self.db.engine.begin() as tx:
            for table, columns in {**moved, "tool_calls": ["lease_until"], "service_leases": ["lease_until"]}.items():
                changes = ", ".join(f"{column} = {column} - {int(seconds * 1000)}" for column in columns)
                tx.execute(text(f"UPDATE {table} SET {changes}"))

    @rule(moves=moves)
    def everybody_is_thought_lost(self, moves: int) -> None:
        """And goes on without knowing, beside the heirs."""
        self.pass_time(LEASE + 1)
        self.send_missing("control:1")
        for message in [message for message in self.bag if message[0] != "call"]:
            self.bag.remove(message)
            self.deliver(message)
        self.go_well(moves)

    @rule()
    def hearts_beat(self) -> None:
        fences = [roller.work.fence for roller in self.rollers]
        held = {roller.work.fence.group for roller in self.rollers if self.holds(roller)}
        assert rollout_claims.extend_leases(self.db, fences, LEASE) == held
        for trainer in self.trainers:
            expected = self.holds(trainer)
            assert train_claims.extend_lease(self.db, trainer.work.id, trainer.work.token, LEASE) == expected

    # people

    @rule(run=st.sampled_from(RUNS), how=st.sampled_from(["paused", "resumed", "resumed"]))
    def pause_or_resume(self, run: str, how: str) -> None:
        status = run_names.find_run(self.db, run)["status"]
        if how == "paused" and status in ("running", "paused"):
            planning.stop(self.db, run, "paused")
        elif how == "resumed" and status in planning.RESUMABLE:
            planning.resume(self.db, run)

    @precondition(lambda self: len(self.seen) > 60)
    @rule(really=seldom)
    def cancel_the_second_run(self, really: bool) -> None:
        if really and run_names.find_run(self.db, "two")["status"] in planning.RESUMABLE:
            planning.stop(self.db, "two", "cancelled")

    # what goes well

    @rule(moves=st.integers(10, 60))
    def go_well(self, moves: int) -> None:
        for _ in range(moves):
            self.move("control:1")

    def move(self, holder: str) -> bool:
        """The next useful thing that healthy processes do; False if time just passes."""
        if self.bag:
            self.deliver(self.bag.pop(0))
        elif self.tools:
            self.end_a_call(0)
        elif any(self.go_on(roller, fails=next(self.number) % 11 == 0) for roller in list(self.rollers)):
            pass
        elif self.trainers:
            self.commit_of(self.trainers[0])
        elif not self.send_missing(holder):
            self.hearts_beat()
            self.pass_time(0.9 * LEASE)
            return False
        return True

    def teardown(self) -> None:
        try:
            idle, moves = 0, 0
            while unfinished := [
                run for run in RUNS if run_names.find_run(self.db, run)["status"] not in ("done", "cancelled")
            ]:
                for run in unfinished:
                    if run_names.find_run(self.db, run)["status"] != "running":
                        planning.resume(self.db, run)
                idle += not self.move("control:last")
                moves += 1
                assert idle < MAX_LEASES, f"{unfinished} stand still"
                assert moves < MAX_MOVES, f"{unfinished} go round in circles"
            self.keeps_its_promises()
            check_complete(self.db)
            assert plan(control_reads.snapshot(self.db, LEASE)) == [], "nothing is left to send"
            assert value(self.db, "SELECT status FROM runs WHERE name = 'one'") == "done", "nobody cancelled it"
        finally:
            self.stack.close()

    # promises

    @invariant()
    def keeps_its_promises(self) -> None:
        check_promises(self.db, self.seen)

    def is_free(self, table: str, row: int) -> bool:
        found = tables.metadata.tables[table].c
        with self.db.read() as tx:
            now = int(tx.execute(select(now_ms())).scalar_one())
            lease = tx.execute(select(found.lease_until).where(found.id == row)).scalar_one()
        return lease is None or lease <= now + 1 or lease > now + 9 * LEASE * 1000

    def overtaken(self, worker: Roller | Trainer) -> bool:
        """Whether its claim is over."""
        if isinstance(worker, Roller):
            fence = worker.work.fence
            held = "SELECT count(*) FROM groups WHERE id = :id AND attempt = :attempt AND status = 'running'"
            return not value(self.db, held, id=fence.group, attempt=fence.attempt)
        held = "SELECT count(*) FROM iterations WHERE id = :id AND train_token = :token AND status IN ('planned', 'running')"
        return not value(self.db, held, id=worker.work.id, token=worker.work.token)

    def holds(self, worker: Roller | Trainer) -> bool:
        """Whether its claim is its own still: a person's `resume` ends one whose lease has run out."""
        table, row = ("groups", worker.work.fence.group) if isinstance(worker, Roller) else ("iterations", worker.work.id)
        named = value(self.db, f"SELECT worker <> '' FROM {table} WHERE id = :id", id=row)
        return bool(named) and not self.overtaken(worker)

    @contextmanager
    def fenced(self, worker: Roller | Trainer) -> Iterator[None]:
        """Whose claim is over writes nothing and is told so; whose is not is not."""
        over = self.overtaken(worker)
        with self.unchanged_if(over):
            try:
                yield
            except Fenced:
                assert over
                (self.rollers if isinstance(worker, Roller) else self.trainers).remove(worker)  # type: ignore[attr-defined]

    @contextmanager
    def unchanged_if(self, over: bool) -> Iterator[None]:
        before = dump(self.db) if over else None
        yield
        assert before is None or dump(self.db) == before, "a zombie wrote"


CALM = settings(suppress_health_check=list(HealthCheck), database=None, phases=[Phase.generate])


@pytest.mark.slow
def test_state_machine_keeps_promises_on_sqlite(migrated_file: Path, tmp_path: Path) -> None:
    @contextmanager
    def opened() -> Iterator[Database]:
        file = tmp_path / "agentrl.db"
        shutil.copy(migrated_file, file)
        db = Database(f"sqlite:///{file}")
        yield db
        db.close()
        for left in tmp_path.glob("agentrl.db*"):
            left.unlink()

    run_state_machine_as_test(lambda: World(opened), settings=settings(CALM, max_examples=25, stateful_step_count=40))


@pytest.mark.slow
def test_state_machine_keeps_promises_on_postgres(postgres: Database) -> None:
    @contextmanager
    def opened() -> Iterator[Database]:
        with postgres.engine.begin() as tx:
            names = ", ".join(table.name for table in tables.metadata.sorted_tables)
            tx.execute(text(f"TRUNCATE {names} RESTART IDENTITY CASCADE"))
        yield postgres

    run_state_machine_as_test(lambda: World(opened), settings=settings(CALM, max_examples=4, stateful_step_count=40))
