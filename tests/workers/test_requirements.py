"""What a run needs of the processes that will run it is looked for there: what they lack, and what they have otherwise."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import ensure_workers
from agentrl.workers.requests import requirements
from agentrl.workers.stack import broker, embedded, presence
from agentrl.workers.stack.celery_app import QUEUES
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ServiceError, WorkerError
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import run_rows
from agentrl.workflow.trajectory import PolicyRef
from tests.support.played_runs import claim, start, submission
from tests.support.real_stack import Stack, embedded_stack
from tests.support.small_models import tiny_random

OWN = """
from agentrl.workflow.envs import Env
from agentrl.workflow.tools import Tool

def poke(text: str) -> str:
    "Pokes it."
    return text

mine = Env(tools=(Tool(poke),), rewards={"format": 1.0})
"""


@pytest.fixture
def stack(short_folder: Path) -> Iterator[Stack]:
    with embedded_stack(short_folder, idle_seconds="3600") as made:
        yield made


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder to search."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("The village lies at the river.")
    return tmp_path / "texts"


def asked(folder: Path, weights: dict[str, float] | None = None, **config: Any) -> requirements.Requirements:
    """About a run of a model in the folder, here."""
    made: RunConfig = build({"env": "qa", **config})
    model, runs = folder / "model", str(folder / "runs")
    if not model.exists():
        tiny_random(model)
    return requirements.requirements_of(
        made.model_dump(mode="json"), weights or {"numeric_answer": 1.0}, str(model), runs, rolls_out=True
    )


def searching(folder: Path) -> requirements.Requirements:
    return asked(folder, tools=("search",))


def test_worker_check_lacks_setting_only_for_its_role(
    home: Path, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_SEARCH", str(texts))
    settings.cache_clear()
    question = searching(tmp_path)
    assert requirements.list_lacks(question, QUEUES) == []
    monkeypatch.delenv("AGENTRL_SEARCH")
    settings.cache_clear()
    assert requirements.list_lacks(question, ["rollout", "train"]) == []
    (said,) = requirements.list_lacks(question, ["tools"])
    assert "no collection is set" in said
    assert "The worker was started without AGENTRL_SEARCH." in said


def test_worker_check_names_other_value_without_sending_it(
    home: Path, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_SEARCH", "http://user:secret@host/search")
    settings.cache_clear()
    question = searching(tmp_path)
    assert "secret" not in json.dumps(asdict(question))
    assert requirements.list_differences(question, ["tools"]) == []
    monkeypatch.setenv("AGENTRL_SEARCH", str(texts))
    assert requirements.list_differences(question, ["tools"]) == ["AGENTRL_SEARCH"]
    assert requirements.list_differences(question, ["rollout", "train"]) == []


def test_worker_check_compares_resolved_folders(
    home: Path, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts.parent)
    monkeypatch.setenv("AGENTRL_SEARCH", "texts")
    question = searching(tmp_path)
    monkeypatch.chdir("/")
    monkeypatch.setenv("AGENTRL_SEARCH", str(texts))
    assert requirements.list_differences(question, ["tools"]) == []


def test_worker_check_needs_no_setting_if_env_has_index(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_SEARCH", raising=False)
    settings.cache_clear()
    assert requirements.list_lacks(asked(tmp_path, env="search_qa"), QUEUES) == []


def test_worker_check_needs_the_same_agent_program(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in ("here", "elsewhere"):
        (tmp_path / folder / "agent.sh").write_text(f"echo {folder}")
    question = asked(tmp_path, agent={"name": "cmd:sh agent.sh", "unsafe": True})
    assert requirements.list_lacks(question, ["agents"], requirements.read_agent) == []
    assert requirements.list_differences(question, ["agents"], requirements.read_agent) == []
    monkeypatch.chdir(tmp_path / "elsewhere")
    (other,) = requirements.list_differences(question, ["agents"], requirements.read_agent)
    assert "cmd:sh agent.sh" in other
    monkeypatch.chdir(tmp_path / "there")
    (lack,) = requirements.list_lacks(question, ["agents"], requirements.read_agent)
    assert "The agent's script 'agent.sh' is not found" in lack


@pytest.mark.parametrize(
    ("changes", "role", "said"),
    [
        ({"base": "/nowhere/model"}, "rollout", "There is no folder '/nowhere/model' here"),
        ({"base": "/nowhere/model"}, "train", "There is no folder '/nowhere/model' here"),
        ({"output_dir": "/proc/runs"}, "train", "cannot write to"),
        ({"version": "0.0.0"}, "tools", "is agentrl"),
        ({"weights": {"no_such_module:reward": 1.0}}, "rollout", "cannot be found"),
    ],
)
def test_worker_check_reports_missing_part_for_its_role(
    home: Path, tmp_path: Path, changes: dict[str, Any], role: str, said: str
) -> None:
    found = requirements.list_lacks(replace(asked(tmp_path), **changes), [role])
    assert said in " ".join(found)


def test_worker_check_reports_broken_optimizer_for_trainer(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("agentrl.workflow.training.optimizer")  # as a worker that trains has
    question = asked(tmp_path, **{"update.optimizer": "adamw_8bit"})
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    assert requirements.list_lacks(question, ["rollout", "tools"]) == []
    (said,) = requirements.list_lacks(question, ["train"])
    assert "The optimizer adamw_8bit does not work here on " in said


def test_worker_check_reports_missing_devices_for_trainer(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_DEVICE", "cuda")
    settings.cache_clear()
    question = asked(tmp_path, **{"update.devices": 64})
    assert requirements.list_lacks(question, ["rollout", "tools"]) == []
    import_module("agentrl.workflow.models.devices")  # as a train worker has
    (said,) = requirements.list_lacks(question, ["train"])
    assert said.startswith("says: update.devices=64 needs 64 GPUs, and torch can use ")


def test_worker_check_survives_module_that_exits(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_here.py").write_text("raise SystemExit('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for role in ("rollout", "tools"):
        (said,) = requirements.list_lacks(asked(tmp_path, env="leaving_here:env"), [role])
        assert "leaving_here.py:1: SystemExit" in said


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_worker_check_names_file_edited_since_import(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "edited_here.py"
    file.write_text("def mine(episode): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    weights = {"edited_here:mine": 1.0}
    before = asked(tmp_path, weights)
    assert requirements.list_differences(before, ["rollout"]) == []
    file.write_text("def mine(episode): return 2.0\n")
    anew = (
        "import json, sys; from tests.workers.test_requirements import *; "
        "print(json.dumps(asdict(asked(Path(sys.argv[1]), {'edited_here:mine': 1.0}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", anew, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    after = requirements.Requirements(**json.loads(done.stdout))
    assert requirements.list_differences(after, ["rollout"]) == ["the file of rewards edited_here:mine"]
    assert requirements.list_differences(after, ["train"]) == []


def test_worker_check_reports_slow_import(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = tmp_path / "going_on"
    waits = f"import os, time\nwhile not os.path.exists({str(going_on)!r}): time.sleep(0.01)\n"
    (tmp_path / "slow_here.py").write_text(f"{waits}def mine(episode): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(requirements, "REPLY_SECONDS", 0.05)
    question = replace(asked(tmp_path), weights={"slow_here:mine": 1.0})
    first = requirements._answer_question(question, ["rollout"])
    assert not first["found"]
    going_on.touch()
    while not (told := requirements._answer_question(question, ["rollout"]))["found"]:
        pass
    assert told["lacks"] == ()


def test_worker_check_knows_in_memory_stack_by_start_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Settings(home=tmp_path, redis_server="none")
    where.stack_dir.mkdir(parents=True)
    monkeypatch.setenv("AGENTRL_SEARCH", "one")
    embedded.write_state(where, stopping=False, separate=False)
    assert embedded.changed_variables(where, ["AGENTRL_SEARCH"]) == []
    monkeypatch.setenv("AGENTRL_SEARCH", "other")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert embedded.changed_variables(where, ["AGENTRL_SEARCH"]) == ["AGENTRL_SEARCH"]
    where_modules_are = embedded.changed_variables(where, ["AGENTRL_SEARCH", *embedded.PATH_VARIABLES])
    assert where_modules_are == ["AGENTRL_SEARCH", "PYTHONPATH", "PWD"]
    assert "other" not in (where.stack_dir / "supervisor.json").read_text()
    (where.stack_dir / "supervisor.json").write_text(json.dumps({"pid": 1, "stopping": False}))
    assert embedded.changed_variables(where, ["AGENTRL_SEARCH"]) == [], "of a release that said nothing nothing is known"


# workers of a broker that is named


def on_broker(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[requirements.WorkerCheck], served: dict[str, int], control: bool = True
) -> None:
    """Workers that answer so; others that `served` counts are mute."""
    monkeypatch.setattr(requirements, "ask_workers", lambda question: list(answers))
    monkeypatch.setattr(presence, "count_workers_by_queue", lambda: served)
    monkeypatch.setattr(presence, "missing_control_hints", lambda db: [] if control else ["No control loop runs."])


def worker(
    number: int, *roles: str, found: bool = True, lacks: tuple[str, ...] = (), other: tuple[str, ...] = ()
) -> requirements.WorkerCheck:
    return requirements.WorkerCheck(f"host:{number}", roles, found, lacks, other)


ONE_EACH = dict.fromkeys(QUEUES, 1)


def test_check_workers_refuses_unfit_worker_if_required(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [worker(1, "rollout", "train"), worker(2, "tools", lacks=("says: no module",)), worker(3, "tools", found=False)]
    lacks = "The tools worker on host (pid 2) says: no module"
    mute = "The tools worker on host (pid 3) has not reported whether it can run this: it is still checking."
    on_broker(monkeypatch, found, ONE_EACH)
    question = asked(tmp_path)
    with pytest.raises(WorkerError, match="No worker was started") as refused:
        ensure_workers._check_named_broker(question, there=True, fit=True)
    assert refused.value.exit_code == 11
    assert refused.value.message.split("\n  ")[1:] == [lacks]
    assert ensure_workers._check_named_broker(question, there=True, fit=False) == [lacks, mute]
    assert ensure_workers._check_named_broker(question, there=False, fit=False) == [lacks, mute]


def test_check_workers_only_reports_differing_and_silent(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_broker(monkeypatch, [worker(1, "rollout", "train", other=("AGENTRL_SEARCH", "the file of rewards mine"))], ONE_EACH)
    assert ensure_workers._check_named_broker(asked(tmp_path), there=True, fit=True) == [
        "The worker of the queue 'tools' has not reported whether it can run this: "
        "it is busy, or runs another version of agentrl.",
        "The rollout and train worker on host (pid 1) differs from this command in: AGENTRL_SEARCH, the file of rewards mine.",
    ]


def test_check_workers_requires_worker_for_each_queue(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_broker(monkeypatch, [worker(1, "rollout", "train")], {**ONE_EACH, "tools": 0}, control=False)
    lines = ["No worker serves the queue 'tools'. Start one: agentrl worker tools", "No control loop runs."]
    monkeypatch.setattr(ensure_workers, "START_SECONDS", 0.0)
    with pytest.raises(ServiceError, match="No worker was started") as refused:
        ensure_workers._check_named_broker(asked(tmp_path), there=True, fit=True)
    assert refused.value.message.split("\n  ")[1:] == lines
    assert ensure_workers._check_named_broker(asked(tmp_path), there=False, fit=False) == lines


def test_named_broker_is_polled_until_workers_are_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`submit` right after `docker compose up -d`: the tools worker answers at the third look, and nothing is refused."""
    looks: list[int] = []

    def answer(question: requirements.Requirements) -> list[requirements.WorkerCheck]:
        looks.append(1)
        return [worker(1, "rollout", "train"), *([worker(2, "tools")] if len(looks) > 2 else [])]

    on_broker(monkeypatch, [], dict.fromkeys(QUEUES, 0))
    monkeypatch.setattr(requirements, "ask_workers", answer)
    monkeypatch.setattr(ensure_workers, "PAUSE_SECONDS", 0.0)
    assert ensure_workers._check_named_broker(asked(tmp_path), there=True, fit=True) == []
    assert len(looks) == 3
    assert capsys.readouterr().err.splitlines() == [
        "Waiting up to 60 s for services that may be starting.",
    ]


def test_named_broker_without_workers_is_not_waited_for(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked once, and no reply is the answer."""
    calls: list[str] = []
    question = asked(tmp_path)
    monkeypatch.setenv("AGENTRL_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.cache_clear()
    monkeypatch.setattr(broker, "require_broker", lambda where: None)
    monkeypatch.setattr(requirements.app.control, "broadcast", lambda *args, **options: calls.append("fit"))
    monkeypatch.setattr(presence, "_ask_queues", lambda: calls.append("served") or {})
    mine, sleep = threading.current_thread(), time.sleep  # what other threads do is no concern of this command
    seen = lambda seconds: calls.append("sleep") if threading.current_thread() is mine else sleep(seconds)  # noqa: E731
    monkeypatch.setattr(time, "sleep", seen)
    told = ensure_workers.ready_workers("mine", question, separate=False, there=False, fit=False)
    settings.cache_clear()
    assert sorted(calls) == ["fit", "served"]
    assert [line.partition(".")[0] for line in told] == [
        *(f"No worker serves the queue {queue!r}" for queue in question.roles),
        "No control loop is running",
    ]


@pytest.mark.parametrize(
    ("changes", "elsewhere"),
    [
        ({}, []),
        ({"tools": ("mcp:files",)}, []),
        ({"env": "own_here:mine"}, ["PWD"]),
        ({"tools": ("own_here:poke",)}, ["PWD"]),
        ({"hooks": ("own_here:hook",)}, ["PWD"]),
        ({"weights": {"own_here:mine": 1.0}}, ["PWD"]),
    ],
)
def test_memory_stack_may_be_elsewhere_without_own_module(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], elsewhere: list[str]
) -> None:
    monkeypatch.setenv("AGENTRL_REDIS_SERVER", "none")
    settings.cache_clear()
    settings().stack_dir.mkdir(parents=True)
    question = asked(tmp_path)
    question = replace(question, weights=changes.get("weights", question.weights), variables={})
    question = replace(question, config={**question.config, **changes})
    embedded.write_state(settings(), stopping=False, separate=False)
    monkeypatch.chdir(tmp_path)
    found = list(ensure_workers._list_unfit(question))
    assert found == [f"The embedded stack differs from this command in: {name}." for name in elsewhere]


@pytest.mark.parametrize("found", [False, True])
def test_submission_does_not_wait_for_busy_worker_check(
    own_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    slow = requirements.WorkerCheck("host:7", QUEUES, found)
    monkeypatch.setattr(requirements, "ask_workers", lambda *question, **more: [slow])
    monkeypatch.setattr(presence, "count_workers_by_queue", lambda: dict.fromkeys(QUEUES, 1))
    told = ensure_workers._check_named_broker(asked(tmp_path), there=False, fit=True)
    assert [line for line in told if "(pid 7) has not reported whether it can run this" in line] == told[-1:] * (not found)


def test_stack_is_not_restarted_under_new_run(own_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = list[object]()
    monkeypatch.setattr(embedded, "restart", lambda *stack: renewed.append(stack))
    monkeypatch.setattr(ensure_workers, "_list_unfit", lambda question: iter(["It lacks a module."]))
    monkeypatch.setattr(requirements, "list_lacks", lambda *question: (start(own_database, submission("came")), [])[1])
    with pytest.raises(WorkerError, match="Other runs use the embedded stack: came"):
        ensure_workers._renew_embedded(asked(tmp_path), False, "mine")
    assert not renewed


def command(stack: Stack, folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A command from another folder, with more in its environment than the stack's starter had."""
    program = [str(Path(sys.executable).with_name("agentrl")), *words]
    here = {**stack.environment, **environment}
    return subprocess.run(program, cwd=folder, env=here, capture_output=True, text=True, timeout=200, check=False)


def up(stack: Stack) -> None:
    """The stack runs, and its tools worker, which is the first to be there, hears."""
    stack.agentrl("up")
    code = "from agentrl.workers.stack.presence import count_workers_by_queue as s; import sys; sys.exit(not s()['tools'])"
    stack.wait(
        lambda: not subprocess.run([sys.executable, "-c", code], env=stack.environment, check=False).returncode,
        "a tools worker",
    )


OWN_ENV = ("--max-steps", "1", "--env", "own_here:mine")


def about_own(stack: Stack, folder: Path) -> list[str]:
    """The words that submit a run which needs a module of that folder."""
    (folder / "own_here.py").write_text(OWN)
    (folder / "qa.jsonl").write_text('{"question": "where?", "answer": "river"}\n')
    words = ["submit", "--dataset", "qa.jsonl", "--model", str(tiny_random(folder / "model")), "--epochs", "1", "--name", "own"]
    return [*words, "--group-size", "2", "--max-new-tokens", "4"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_idle_stack_lacking_requirement_restarts(stack: Stack, tmp_path: Path) -> None:
    words = about_own(stack, tmp_path)
    up(stack)
    first = embedded.find_supervisor(stack.settings)
    done = command(stack, tmp_path, *words, *OWN_ENV)
    assert done.returncode == 0, done.stderr + stack.logs()
    assert "No module named 'own_here'" in done.stderr
    assert "Restarting the embedded stack" in done.stderr
    assert embedded.find_supervisor(stack.settings) not in (None, first)
    assert embedded.stay_file(stack.settings).exists(), "as `agentrl up` wished"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_idle_stack_lacking_agent_restarts(stack: Stack, tmp_path: Path) -> None:
    words = about_own(stack, tmp_path)
    (tmp_path / "silent.py").write_text("def solve(task, llm): ...")
    up(stack)
    done = command(stack, tmp_path, *words, "--env", "qa", "--agent", "silent:solve")
    assert done.returncode == 0, done.stderr + stack.logs()
    assert "The agents worker on" in done.stderr
    assert "No module named 'silent'" in done.stderr
    assert "Restarting the embedded stack" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_busy_stack_lacking_requirement_is_left_alone(stack: Stack, tmp_path: Path, texts: Path) -> None:
    words = [*about_own(stack, tmp_path), "--max-steps", "1"]
    stack.environment["AGENTRL_LEASE_SECONDS"] = "3600"  # what is claimed here stays claimed
    up(stack)
    first = embedded.find_supervisor(stack.settings)
    (held,) = start(stack.database, submission("elsewhere", tasks=1))
    claim(stack.database, held, lease=3600)
    refused = command(stack, tmp_path, *words, "--env", "qa", "--tools", "search", AGENTRL_SEARCH=str(texts))
    assert refused.returncode == 11, refused.stderr + stack.logs()
    for said in ("The worker was started without AGENTRL_SEARCH.", "elsewhere", "agentrl down"):
        assert said in refused.stderr
    assert str(texts) not in refused.stderr, "values are nobody's business"
    assert embedded.find_supervisor(stack.settings) == first
    left, other = run_rows.list_runs(stack.database).rows
    assert (left["run"], left["status"], other["run"], other["status"]) == ("own", "failed", "elsewhere", "running")
    assert "elsewhere" in left["reason"]
    assert "then: agentrl resume own" in refused.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_resume_continues_after_environment_is_fixed(stack: Stack, tmp_path: Path) -> None:
    about_own(stack, tmp_path)
    model = tmp_path / "model"
    wanted = submission("own", tasks=1)
    wanted = replace(wanted, config={**wanted.config, "env": "own_here:mine"}, weights={"numeric_answer": 1.0})
    wanted = replace(wanted, policy=PolicyRef(str(model), base_hash(model)), output_dir=str(tmp_path / "runs"))
    planning.submit(stack.database, wanted)
    planning.stop(stack.database, "own", "failed", "its worker could not import it")
    up(stack)
    refused = command(stack, Path("/"), "resume", "own")
    assert refused.returncode == 11, refused.stderr + stack.logs()
    assert "this command lacks something that the run needs, too" in refused.stderr
    assert run_rows.describe_run(stack.database, "own")["status"] == "failed", "it is not running again"
    resumed = command(stack, tmp_path, "resume", "own")
    assert resumed.returncode == 0, resumed.stderr + stack.logs()
    assert "Restarting the embedded stack" in resumed.stderr
    stack.wait(lambda: run_rows.describe_run(stack.database, "own")["episodes_done"] == 2, "the episodes' end")
