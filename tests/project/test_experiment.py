"""Experiment: a config with what its names lead to."""

import pytest

from agentrl.workflow.config import build
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.experiment import Experiment


def test_experiment_loads_parts_lazily_and_once() -> None:
    made = Experiment(build({"env": "math", "tools": "echo", "rollout.engine": "nowhere:engine"}))
    assert made.tools is made.tools
    assert made.tools.keys() == {"calculator", "echo"}
    assert (made.algorithm.name, made.trainer.name) == ("grpo", "agentrl")
    with pytest.raises(ConfigError, match="nowhere:engine"):
        _ = made.engine
    assert (Experiment(build({})).env, Experiment(build({})).tools) == (Env(), {})


def test_experiment_stored_scores_with_its_weights() -> None:
    asked = Experiment(build({"env": "code", "rewards": {"length": 0.5}}))
    assert asked.weights == {**dict.fromkeys(asked.env.rewards, 0.0), "length": 0.5}
    assert asked.judges.keys() == {"tests_passed", "progress"}
    stored = Experiment.load(asked.config.model_dump(mode="json"), {"length": 2.0})
    assert (stored.config, stored.weights, stored.judges) == (asked.config, {"length": 2.0}, {})
    assert stored.scoring_hash() != asked.scoring_hash()


def test_experiment_reads_the_texts_of_a_search() -> None:
    """The plug-ins themselves stay as they are, and an agent's run leaves the texts to the agent."""
    plain = Experiment(build({"env": "math"}))
    reads = plain.reading({"system_prompt": "Add.", "tool:calculator": "Adds."})
    assert (reads.env.system_prompt, reads.tools["calculator"].schema["function"]["description"]) == ("Add.", "Adds.")
    assert plain.env.system_prompt != "Add."
    assert plain.tools["calculator"].schema["function"]["description"] != "Adds."
    agents = Experiment(build({"env": "math", "agent.name": "my_agent:solve"}))
    assert agents.reading({"system_prompt": "Add."}) is agents
