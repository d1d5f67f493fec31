"""An agent as a person names it: what is refused before anything is written, and what is said of one that may run."""

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.workers.requests import requirements
from agentrl.workers.requests.agent_request import check_function, remark_on_agent, resolve_agent
from agentrl.workers.requests.eval_config import eval_config, stored_sampling_values
from agentrl.workflow.agents.agent_limits import check_held
from agentrl.workflow.config import KEYS, LOOP_LIMITS, AgentConfig, RolloutConfig, RunConfig, build
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import ConfigError, DatasetError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import Hook
from agentrl.workflow.resolve import resolve
from agentrl.workflow.trajectory import Message, Task
from tests.support.small_models import tiny_random

HERE = "tests.workers.test_agent_requests"
SAID = Task("t/0", (Message("user", "hi"),), "1")


def solve(task: Any, llm: Any) -> float:
    return 1.0


async def wait_and_solve(task: Any, llm: Any) -> None:
    await asyncio.sleep(0)


def lonely(task: Any) -> None: ...


def crowded(task: Any, llm: Any, more: Any) -> None: ...


def yields(task: Any, llm: Any) -> Any:
    yield 1


class Agent:
    def __init__(self, task: Any, llm: Any) -> None: ...

    def __call__(self, task: Any, llm: Any) -> None: ...


quick = lambda task, llm: None  # noqa: E731
bound = functools.partial(crowded, more=1)
called = Agent(None, None)
plain = Env()


class Chatty(Env):
    def step(self, episode: Any) -> tuple[Message, ...]:
        return ()


chatty = Chatty(rewards={"format": 1.0})


class Gives(Hook):
    """A hook that may add rewards."""


def settled(agent: str, tasks: tuple[Task, ...] = (SAID,), **more: Any) -> RunConfig:
    return resolve_agent(Experiment(RunConfig(agent=agent, **({"env": "arithmetic"} | more))), tasks)  # type: ignore[arg-type]


def test_agent_config_takes_section_text_and_flat_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    wanted = AgentConfig(name="mine:solve", processes=3)
    for text in ("agent: {name: 'mine:solve', processes: 3}", "agent: mine:solve\nagent.processes: 3"):
        path.write_text(text)
        assert resolve(path)[0].agent == wanted
    path.write_text("agent: 'cmd:python agent.py'")
    config, origins = resolve(path)
    assert config.agent is not None
    assert config.agent.command == ("python", "agent.py")
    assert origins["agent.name"] == str(path)
    for one in (config, RunConfig()):
        assert build(one.flat()) == one == RunConfig.model_validate(one.model_dump(mode="json"))
        assert tuple(one.flat()) == KEYS


def test_agent_program_is_sandboxed_and_function_on_request() -> None:
    asked = [
        ({"name": "cmd:sh run.sh"}, True),
        ({"name": "cmd:sh run.sh", "unsafe": True}, False),
        ({"name": "mine:solve"}, False),
        ({"name": "mine:solve", "sandbox": True, "network": "all"}, True),
    ]
    assert [AgentConfig.model_validate(values).sandboxed for values, _ in asked] == [there for _, there in asked]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"agent.network": "all"}, "agent.network has no effect without agent.name"),
        ({"agent.name": "mine:solve", "agent.network": "all"}, "network has no effect without the sandbox"),
        ({"agent.name": "mine:solve", "agent.unsafe": True}, "unsafe applies only to programs"),
        (
            {"agent.name": "cmd:agent", "agent.reuse": True},
            "agent.reuse works only for an agent that is a function and has no sandbox",
        ),
        (
            {"agent.name": "external", "agent.reuse": True},
            "agent.reuse works only for an agent that is a function and has no sandbox",
        ),
        ({"agent.name": "mine:solve", "agent.reuse": True, "agent.frozen_clock": True}, "leave reuse or frozen_clock out"),
        ({"agent.name": "cmd:sh", "agent.unsafe": True, "agent.sandbox": True}, "exclude each other"),
        ({"agent.name": "cmd:sh", "agent.sandbox": False}, "unsafe: true runs it without"),
        ({"agent.name": "mine:solve", "tools": ["python"]}, "an agent, which has its own tools"),
        ({"agent.name": "mine:solve", "rollout.max_steps": 5}, "use agent.max_calls"),
        ({"agent.name": "mine:solve", "rollout.max_tool_calls": 5}, "it runs its own tools"),
        ({"agent.name": "mine"}, "package.module:function"),
        ({"agent.name": "mine:"}, "package.module:function"),
        ({"agent.name": "mine.:solve"}, "package.module:function"),
        ({"agent.name": "os;rm:x"}, "package.module:function"),
        ({"agent.name": "cmd:"}, "missing program after cmd"),
        ({"agent.name": "cmd:''"}, "missing program after cmd"),
        ({"agent.name": "cmd:sh 'x"}, "quote it as for a shell"),
        ({"agent.name": "cmd:sh \0"}, "cannot contain NUL"),
        ({"agent.name": "cmd:" + "x" * 5000}, "at most 4096"),
        ({"agent.name": True}, "true or false"),
        ({"agent.name": "mine:solve", "agent.timeout_seconds": 0}, "agent.timeout_seconds"),
        ({"agent.name": "mine:solve", "agent.memory_mb": 1}, "agent.memory_mb"),
        ({"agent.name": "mine:solve", "agent.max_calls": 0}, "agent.max_calls"),
        ({"agent.name": "mine:solve", "agent.sandbox": "maybe"}, "agent.sandbox"),
    ],
)
def test_agent_config_error_is_one_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        build(values)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("function", [solve, wait_and_solve, bound, called])
def test_agent_accepts_function_of_task_and_model(function: Callable[..., Any]) -> None:
    check_function("mine:it", function)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lonely, "cannot be called with a task and a model: too many"),
        (crowded, "cannot be called with a task and a model: missing"),
        (Agent, "is a class without rollout"),
        (quick, "is a lambda"),
        (yields, "is a generator"),
    ],
)
def test_agent_rejects_non_callable_with_example(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*def solve") as caught:
        check_function("mine:it", function)
    assert caught.value.exit_code == 2


def test_agent_names_missing_program() -> None:
    check_held(AgentConfig(name="cmd:sh -c true"))
    with pytest.raises(ConfigError, match="'pythn' is not found on PATH"):
        check_held(AgentConfig(name="cmd:pythn agent.py"))


def test_agent_misspelling_gets_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "near_agent.py").write_text("def solve(task, llm): ...\n")
    with pytest.raises(ConfigError, match="Did you mean 'near_agent:solve'"):
        settled("near_agent:slove")
    with pytest.raises(ConfigError, match="Did you mean 'near_agent'"):
        settled("near_agnt:solve")


def test_agent_refuses_tasks_without_messages_and_answering_envs() -> None:
    with pytest.raises(DatasetError, match=r"1 of 2 tasks of 'gsm8k' has no messages \(the first is 't/1'\)"):
        settled(f"{HERE}:solve", (SAID, Task("t/1", (), "1")))
    with pytest.raises(ConfigError, match="decides what follows a turn"):
        settled(f"{HERE}:solve", env=f"{HERE}:chatty")


def test_agent_rewards_count_without_other_rewards() -> None:
    own = [
        settled(f"{HERE}:solve", env=f"{HERE}:plain").agent,
        settled(f"{HERE}:solve", env=f"{HERE}:plain", rewards={"format": 0.5}).agent,
        settled(f"{HERE}:solve", env=f"{HERE}:plain", hooks=(f"{HERE}:Gives",)).agent,
        settled(f"{HERE}:solve").agent,
    ]
    assert [agent.own_rewards for agent in own if agent] == [True, False, False, False]
    assert resolve_agent(Experiment(RunConfig(env="arithmetic")), ()) == RunConfig(env="arithmetic")


def test_agent_remarks_appear_once_for_agent_runs_only() -> None:
    def told(**config: Any) -> str:
        return "\n".join(remark_on_agent(Experiment(build({"env": "arithmetic", **config}))))

    function = told(**{"agent.name": f"{HERE}:solve"})
    assert "is your own code and runs without a sandbox, with your rights." in function
    assert "starts again, and so do the side effects of its tools" in function
    assert "The tools of the env 'arithmetic' are not used" in function
    assert "sandbox" not in told(**{"agent.name": "cmd:sh"})
    assert "program runs without a sandbox" in told(**{"agent.name": "cmd:sh", "agent.unsafe": True})
    assert told() == ""


def test_agent_is_not_offered_env_tools() -> None:
    made = Experiment(RunConfig(env="arithmetic", agent=f"{HERE}:solve"))  # type: ignore[arg-type]
    assert made.tools == {}
    assert made.agent is solve
    assert dict(made.weights) == {"numeric_answer": 1.0}


def test_evaluation_with_other_agent_resets_loop_options() -> None:
    limits = {"rollout.max_steps": 9, "rollout.max_tool_calls": 3, "rollout.last_turn": "ask"}
    assert limits.keys() == {f"rollout.{name}" for name in LOOP_LIMITS}
    trained = build({"tools": ["python"], "env": "arithmetic", **limits})
    first = eval_config(trained, None, "test", None, {}, agent={"name": f"{HERE}:solve", "network": None})
    assert first.agent == AgentConfig(name=f"{HERE}:solve")
    assert first.tools == ()
    assert all(getattr(first.rollout, name) == getattr(RolloutConfig(), name) for name in LOOP_LIMITS)
    sandboxed = eval_config(first, None, "test", None, {}, agent={"sandbox": True})
    assert sandboxed.agent == AgentConfig(name=f"{HERE}:solve", sandbox=True)
    assert eval_config(first, None, "test", None, {}).agent == first.agent
    stored = [stored_sampling_values(config.model_dump(mode="json"))["agent.name"] for config in (trained, first)]
    assert stored == [None, f"{HERE}:solve"]


def test_worker_check_covers_agent(tmp_path: Path) -> None:
    def asked(**config: Any) -> requirements.Requirements:
        made = build({"env": "qa", **config})
        tiny_random(tmp_path / "model")
        return requirements.requirements_of(made.model_dump(mode="json"), {}, str(tmp_path / "model"), "", rolls_out=True)

    assert "agents" not in asked().roles
    question = asked(**{"agent.name": f"{HERE}:solve"})
    assert question.own
    assert not asked(**{"agent.name": "cmd:sh"}).own
    assert requirements.list_lacks(question, ["agents"]) == []
    assert requirements.list_differences(question, ["agents"]) == []
    (said,) = requirements.list_lacks(asked(**{"agent.name": "nowhere_at_all:solve"}), ["agents"])
    assert "No module named 'nowhere_at_all'" in said
    (said,) = requirements.list_lacks(asked(**{"agent.name": f"{HERE}:lonely"}), ["agents"])
    assert "cannot be called with a task and a model" in said
    (said,) = requirements.list_lacks(asked(**{"agent.name": "cmd:pythn", "agent.unsafe": True}), ["agents"])
    assert "'pythn' is not found on PATH" in said


@pytest.mark.slow
def test_submit_dry_run_shows_agent(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--dataset", "arithmetic", "--model", str(tiny_random(tmp_path / "m")), "--agent", f"{HERE}:solve"]
    assert main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["agent"] == f"{HERE}:solve (no sandbox)"
    assert plan["rewards"] == "numeric_answer x 1, the agent's rewards x 0"
    assert plan["config"]["agent"]["name"] == f"{HERE}:solve"
    words[-1] = "cmd:/bin/sh -c true"
    assert main([*words, "--agent-network", "all", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agent"] == "cmd:/bin/sh -c true (in the sandbox, reaches all)"
    assert not home.exists()
