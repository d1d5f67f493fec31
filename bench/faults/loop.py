"""The loop: every fault point, hit by hit, until a run passes untouched; several experiments side by side.

First an undisturbed run says how often each point is hit, and what the run comes to. Points that only a recovery passes are
found by runs with a fault of their own, and tested with a second fault on top of it.
"""

import gc
import importlib
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.faults.experiment import Experiment, forked
from bench.faults.record import IN_TOOLS, Record, complete, read, violations

PRELUDES = ("", "submit.after:1:kill", "commit_sampled.after:2:kill")
"""Nothing; a submitter that dies before its first message; a rollout worker that dies and whose groups are sent again."""

AGENT_PRELUDES = ("", "agent.started:1:kill")
"""Nothing; an agents worker that dies, so that its agents begin anew."""

IN_TRAINER = ("claim_iteration", "update", "checkpoint", "commit_update", "rivals", "optimizer", "train")
"""Points of a trainer."""

IN_RECOVERY = ("control", "send_rollouts")
"""Points that an undisturbed run passes only by chance, where a tick of the control loop was faster than a message."""

BY_THE_CLOCK = ("take_service_lease", "extend_", "publish_service", "wait_")
"""Points that come by the clock, or where something takes long: how often, no run decides."""

ZOMBIES = (
    "claim_group.after",
    "generate.sent",
    "commit_sampled.before",
    "run_tool.after",
    "update.after",
    "checkpoint.renamed",
    "agent.claimed",
    "agent.over",
    "agent_call.sampled",
    "agent_call.committed",
    "endpoint.forwarded",
)
"""Where standing still until the lease is over is another thing than dying."""

OF_OTHER_WORLDS = {
    "critic": ("update.after", "checkpoint", "commit_update", "optimizer"),
    "boxed": ("program", "run_tool.after", "call.end"),
    "agent": ("agent", "endpoint", "send_", "claim_", "finish_", "open_", "publish_", "commit_", "lose_", "restart_"),
}
"""For each other world, the points that a sample has: those where a fault does something else there than in the plain world."""

WITHOUT_WORKER = ("submit.after", "control.after")
"""Points of a process that runs no job: the submitter and the control loop."""

ACTIONS = ("kill", "raise", "sleep")
MAX_HITS = 100

_PRELOADED = (
    "torch._dynamo",
    "transformers.models.qwen2.modeling_qwen2",
    "alembic.command",
    "billiard.pool",
    "celery.apps.worker",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.backends.redis",
    "celery.events.receiver",
    "celery.fixups.django",
    "celery.concurrency.thread",
    "celery.worker.autoscale",
    "celery.worker.consumer",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.strategy",
    "kombu.mixins",
    "kombu.transport.redis",
    "numpy.ctypeslib",
    "sqlalchemy.dialects.sqlite",
    "agentrl.workflow.training.supervised",
    "agentrl.workflow.training.trainer",
    "agentrl.workflow.inference.sampler",
    "agentrl.workflow.store.migrate",
    "agentrl.workflow.store.reads.run_rows",
    "agentrl.workflow.store.train_claims",
    "agentrl.workflow.store.train_commits",
    "agentrl.workflow.store.steps",
    "agentrl.workflow.store.tool_calls",
    "agentrl.workflow.control.snapshot",
    "agentrl.workflow.store.agent_attempts",
    "agentrl.workflow.store.agent_holds",
    "agentrl.workflow.store.endpoint_reads",
    "asyncio",
    "bench.faults.world",
    "uvicorn.protocols.http.h11_impl",
)
"""What the workers import, but for the workers themselves: their app reads the environment when it is imported."""


@dataclass(frozen=True)
class Case:
    """One fault to try: what happens at which hit of which point, after which prelude; `hits` as in the recorded run."""

    point: str
    action: str
    hit: int
    hits: int
    prelude: str = ""
    env: str = "world"

    @property
    def fault(self) -> str:
        """As AGENTRL_FAULT takes it."""
        return ",".join(filter(None, [self.prelude, f"{self.point}:{self.hit}:{self.action}"]))


@dataclass(frozen=True)
class Result:
    """What came of a case: `untouched` (the point was not hit so often), `recovered` or `violated`."""

    outcome: str
    seconds: float = 0.0
    deaths: tuple[str, ...] = ()
    violated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """A run with nothing but its prelude: how long it took, the hits of every point, what it came to."""

    seconds: float
    hits: dict[str, int]
    record: Record = field(repr=False)


@dataclass(frozen=True)
class Laboratory:
    """What all experiments share; `folder` has a short path."""

    folder: Path
    seed: int = 0

    def experiment(self, name: str, fault: str, env: str = "world") -> Experiment:
        """A new experiment in a folder of its own."""
        folder = self.folder / name
        folder.mkdir()
        return Experiment(folder, self.folder / "model", self.folder / "migrated.db", self.seed, env, fault)


@contextmanager
def laboratory() -> Iterator[Laboratory]:
    """Everything imported, a model made, a database migrated; this process itself begins no thread and opens nothing."""
    for name in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{name}_NUM_THREADS"] = "1"
    os.environ |= {"AGENTRL_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # else each child would look through all of it, again and again
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    with TemporaryDirectory(prefix="arl-", dir="/tmp") as folder:
        made = Laboratory(Path(folder))
        _wait(forked(lambda: _furnish(made.folder), made.folder / "log"), made.folder / "log")
        yield made


def _furnish(folder: Path) -> None:
    from agentrl.workflow.store.migrate import open_database
    from bench.faults.world import make_model

    open_database(f"sqlite:///{folder / 'migrated.db'}").close()
    make_model(folder / "model")


def _wait(pid: int, log: Path) -> None:
    _, status = os.waitpid(pid, 0)
    if status:
        raise AssertionError(log.read_text())


def recordings(lab: Laboratory) -> tuple[Laboratory, dict[str, Recording]]:
    """The runs without a fault but their preludes, and the laboratory with a seed whose run has all that we want to disturb.

    Raises:
        AssertionError: no seed has; or a prelude alone breaks the run.
    """
    for seed in range(10):
        lab = replace(lab, seed=seed)
        plain = _recorded(lab, "")
        if complete(plain.record):
            break
    else:
        raise AssertionError(f"No seed gives a run with two turns in every episode: {plain.record}")
    found = {"": plain}
    for prelude in PRELUDES[1:]:
        found[prelude] = _recorded(lab, prelude)
        wrong = violations(found[prelude].record, plain.record, prelude)
        assert not wrong, f"{prelude}: {wrong}"
    return lab, found


def in_box(lab: Laboratory, plain: Record) -> Recording | None:
    """The undisturbed run whose tool is a program in the sandbox; None where no sandbox holds.

    Raises:
        AssertionError: it is not the run of the other world, token for token.
    """
    pid = forked(_look_for_sandbox, lab.folder / "log")
    if os.waitpid(pid, 0)[1]:
        return None
    found = _recorded(lab, "", "boxed")
    wrong = violations(found.record, plain, "")
    assert not wrong, f"in the sandbox: {wrong}"
    return found


def with_critic(lab: Laboratory) -> Recording:
    """The undisturbed run that learns by PPO.

    Raises:
        AssertionError: it has not all that there is to disturb, or no critic.
    """
    found = _recorded(lab, "", "critic")
    assert complete(found.record), found.record
    assert all(critic for kind, _, _, critic in found.record["policies"].values() if kind == "trained"), found.record
    return found


def with_agents(lab: Laboratory) -> dict[str, Recording]:
    """The runs whose turns agents decide, who call the endpoint, without a fault but their preludes.

    Raises:
        AssertionError: they have not all that there is to disturb, or a prelude alone breaks the run.
    """
    found = {prelude: _recorded(lab, prelude, "agent") for prelude in AGENT_PRELUDES}
    for prelude, recording in found.items():
        wrong = violations(recording.record, found[""].record, prelude)
        assert complete(recording.record, "agent"), recording.record
        assert not wrong, f"{prelude}: {wrong}"
    return found


def of_agents(recorded: Mapping[str, Recording], known: Collection[str], actions: Sequence[str]) -> list[Case]:
    """The first hit of every point that runs without agents, whose points are `known`, do not pass."""
    seen, cases = set(known), list[Case]()
    for prelude, recording in recorded.items():
        new = {point: n for point, n in recording.hits.items() if point not in seen and not point.startswith(BY_THE_CLOCK)}
        cases += [Case(point, action, 1, hits, prelude, "agent") for point, hits in new.items() for action in actions]
        seen |= new.keys()
    return cases


def of_trainer(critic: Recording, actions: Sequence[str]) -> list[Case]:
    """The first hit of every point of a trainer in the third world."""
    points = {point: hits for point, hits in critic.hits.items() if point.startswith(IN_TRAINER)}
    return [Case(point, action, 1, hits, env="critic") for point, hits in points.items() for action in actions]


def _look_for_sandbox() -> None:
    from agentrl.workflow.sandbox.find import find_sandbox
    from agentrl.workflow.settings import Settings

    find_sandbox(Settings()).close()


def of_tools(boxed: Recording, actions: Sequence[str]) -> list[Case]:
    """The first hit of every point of a tools worker in the second world, but for what the sandbox has no part in."""
    points = {point: hits for point, hits in boxed.hits.items() if point.startswith(IN_TOOLS) and "once" not in point}
    return [
        Case(point, action, 1, hits, env="boxed")
        for point, hits in points.items()
        for action in actions
        if action == "kill" or point.startswith("program")
    ]


def _recorded(lab: Laboratory, prelude: str, env: str = "world") -> Recording:
    experiment = lab.experiment(
        f"r{lab.seed}{(AGENT_PRELUDES if env == 'agent' else PRELUDES).index(prelude)}{env}", prelude, env
    )
    answer = experiment.folder / "answer.json"

    def work() -> None:
        seconds = experiment.run()
        assert not experiment.violations, experiment.violations
        answer.write_text(json.dumps(asdict(Recording(seconds, hits_of(experiment), read(experiment.home)))))

    _wait(forked(work, experiment.folder / "log"), experiment.folder / "log")
    return Recording(**json.loads(answer.read_text()))


def hits_of(experiment: Experiment) -> dict[str, int]:
    """How often each point was hit."""
    return {file.name: file.stat().st_size for file in sorted((experiment.folder / "hits").iterdir())}


def every(recorded: dict[str, Recording], actions: Sequence[str]) -> list[Case]:
    """The first hit of every point, from which `play` goes on; a point belongs to the first prelude that leads to it."""
    seen: set[str] = set()
    cases = []
    for prelude, recording in recorded.items():
        later = () if prelude else IN_RECOVERY
        new = {point: hits for point, hits in recording.hits.items() if point not in seen and not point.startswith(later)}
        cases += [Case(point, action, 1, hits, prelude) for point, hits in new.items() for action in actions]
        seen |= new.keys()
    return cases


def sample(firsts: Sequence[Case]) -> list[Case]:
    """Return a kill for every point, an exception and a sleep at `ZOMBIES`, and an exception where no worker is at work.

    The kills of the plain world come at the first, a middle and the last hit of a point in turn. `make faults` tries every hit.
    """
    cases, kills = list[Case](), count()
    for case in firsts:
        middle = (case.hits + 1) // 2
        if not case.point.startswith(OF_OTHER_WORLDS.get(case.env, "")):
            continue
        if case.action == "sleep" and case.point not in ZOMBIES and case.env != "boxed":
            continue
        if case.env == "critic":  # at the last hit there is something to lose
            cases += [replace(case, hit=case.hits)] if case.action == "kill" else []
        elif case.env == "agent":  # at the first hits nothing was said yet
            cases += [replace(case, hit=middle)] if case.action != "raise" else []
        elif case.env == "boxed":  # at the first hits the sandbox is tried out
            cases.append(replace(case, hit=middle))
        elif case.action == "kill":
            cases.append(replace(case, hit=(1, middle, case.hits)[next(kills) % 3]))
        elif case.action == "sleep" or case.point in (*ZOMBIES, *WITHOUT_WORKER):
            cases.append(case)
    return cases


def play(
    lab: Laboratory,
    cases: Sequence[Case],
    undisturbed: Mapping[str, Record],
    jobs: int,
    on: bool,
    told: Callable[[Case, Result], None],
) -> None:
    """Plays the cases, `jobs` at a time, each against the undisturbed run of its world.

    `on`: from each on to the next hit, until a run is untouched.

    How often a point is hit varies a little, since what ends together is committed together: without `on`, a last hit that did
    not happen gives way to the one before it.
    """
    waiting = deque(cases)
    running: dict[int, tuple[Case, Experiment]] = {}
    number = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            case, number = waiting.popleft(), number + 1
            experiment = lab.experiment(str(number), case.fault, case.env)
            running[_begun(case, experiment, undisturbed[case.env])] = (case, experiment)
        pid, _ = os.waitpid(-1, 0)
        case, experiment = running.pop(pid)
        result = _ended(experiment)
        told(case, result)
        if result.outcome != "violated":
            shutil.rmtree(experiment.folder)
        following = _following(case, result.outcome != "untouched", on)
        if following:
            waiting.appendleft(replace(case, hit=following))


def _following(case: Case, touched: bool, on: bool) -> int:
    """The hit to try next; 0 for none."""
    if on:
        return case.hit + 1 if touched and case.hit < MAX_HITS else 0
    return 0 if touched else case.hit - 1


def _begun(case: Case, experiment: Experiment, undisturbed: Record) -> int:
    def work() -> None:
        seconds = experiment.run()
        wrong = experiment.violations or violations(read(experiment.home), undisturbed, case.fault)
        hit = hits_of(experiment).get(case.point, 0) >= case.hit
        outcome = "violated" if wrong else "recovered" if hit else "untouched"
        result = Result(outcome, seconds, tuple(experiment.deaths), tuple(wrong))
        (experiment.folder / "answer.json").write_text(json.dumps(asdict(result)))

    return forked(work, experiment.folder / "log")


def _ended(experiment: Experiment) -> Result:
    answer = experiment.folder / "answer.json"
    if not answer.exists():
        return Result("violated", violated=(f"the experiment itself failed: {(experiment.folder / 'log').read_text()}",))
    found = json.loads(answer.read_text())
    return Result(found["outcome"], found["seconds"], tuple(found["deaths"]), tuple(found["violated"]))
