"""The container files keep their promises: which services there are, who builds, what the tools may do. `make compose-test`
runs them.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import make_url

from agentrl.workflow.settings import Settings
from agentrl.workflow.store import migrate

ROOT = Path(__file__).parents[2]
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
OURS = ("control", "rollout", "train", "tools")


def test_the_stack_is_two_servers_and_one_service_for_each_role() -> None:
    assert set(SERVICES) == {"postgres", "redis", *OURS}
    assert {name: SERVICES[name]["command"][-1] for name in ("rollout", "train", "tools")} == {
        "rollout": "rollout",
        "train": "train",
        "tools": "tools",
    }
    assert not any("ports" in service for service in SERVICES.values())


def test_the_tools_service_is_locked_down() -> None:
    tools = SERVICES["tools"]
    assert tools["volumes"] == []
    assert tools["read_only"] is True
    assert tools["tmpfs"] == ["/tmp:size=256m"]
    assert tools["ipc"] == "none"
    assert tools["cap_drop"] == ["ALL"]
    assert tools["security_opt"] == ["no-new-privileges:true"]
    assert tools["networks"] == ["inside"]
    assert STACK["networks"]["inside"] == {"internal": True}
    assert tools["mem_limit"]
    assert tools["pids_limit"]
    assert tools["init"] is True
    assert not {"privileged", "cap_add", "devices", "user", "pid"} & set(tools)


def test_only_control_knows_the_readers_password() -> None:
    assert [name for name in OURS if "AGENTRL_READER_PASSWORD" in SERVICES[name]["environment"]] == ["control"]


def test_the_tools_log_in_as_a_role_that_control_makes_and_know_no_other_password() -> None:
    logins = {name: make_url(shown(SERVICES[name]["environment"]["AGENTRL_DATABASE_URL"])) for name in OURS}
    assert {name: login.username for name, login in logins.items()} == dict.fromkeys(OURS, "agentrl") | {
        "tools": migrate.TOOLS_ROLE
    }
    assert logins["tools"].password == shown(SERVICES["control"]["environment"]["AGENTRL_TOOLS_PASSWORD"])
    assert set(re.findall(r"\w*PASSWORD", str(SERVICES["tools"]["environment"]))) == {"AGENTRL_TOOLS_PASSWORD"}


def shown(text: str) -> str:
    """The text with what its variables are where nobody sets them."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


def test_every_variable_set_is_a_setting() -> None:
    known = {f"AGENTRL_{name.upper()}" for name in Settings.model_fields}
    given = {name for service in OURS for name in SERVICES[service]["environment"]}
    assert given | set(re.findall(r"\bAGENTRL_\w+", DOCKERFILE)) <= known


def test_one_service_builds_the_image_that_all_use() -> None:
    assert {SERVICES[name]["image"] for name in OURS} == {"agentrl"}
    assert [name for name in SERVICES if "build" in SERVICES[name]] == ["control"]
    assert set(SERVICES["control"]["build"]["args"]) == set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_the_gpu_file_only_adds_to_services_that_exist() -> None:
    assert GPU["services"]["control"] == {"build": {"args": {"TORCH_INDEX": ""}}}
    assert {name for name in GPU["services"] if "deploy" in GPU["services"][name]} == {"rollout", "train"}
    assert set(GPU["services"]) <= set(SERVICES)


@pytest.mark.parametrize("stack", [STACK, GPU], ids=["docker-compose.yml", "docker-compose.gpu.yml"])
def test_compose_v1_can_read_it_too(stack: dict[str, Any]) -> None:
    top = {key for key in stack if not key.startswith("x-")}
    assert top <= {"services", "networks", "volumes"}
    for service in stack["services"].values():
        assert not {"profiles", "develop", "extends", "secrets", "configs"} & set(service)
    assert "RUN --" not in DOCKERFILE
