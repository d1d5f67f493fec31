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
OURS = ("control", "rollout", "train", "tools", "endpoint", "agents")
LOCKED = ("tools", "agents")


def test_the_stack_is_two_servers_and_one_service_for_each_role() -> None:
    assert set(SERVICES) == {"postgres", "redis", *OURS}
    roles = ("rollout", "train", "tools", "endpoint", "agents")
    assert {name: SERVICES[name]["command"][:3] for name in roles} == {name: ["agentrl", "worker", name] for name in roles}
    assert not any("ports" in service for service in SERVICES.values())


@pytest.mark.parametrize("name", LOCKED)
def test_what_runs_what_models_write_is_locked_down(name: str) -> None:
    tools = SERVICES[name]
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


def test_tools_and_agents_log_in_as_roles_that_control_makes_and_know_no_other_password() -> None:
    logins = {name: make_url(shown(SERVICES[name]["environment"]["AGENTRL_DATABASE_URL"])) for name in OURS}
    assert {name: login.username for name, login in logins.items()} == dict.fromkeys(OURS, "agentrl") | {
        "tools": migrate.TOOLS_ROLE,
        "agents": migrate.AGENTS_ROLE,
    }
    for name in LOCKED:
        variable = f"AGENTRL_{name.upper()}_PASSWORD"
        assert logins[name].password == shown(SERVICES["control"]["environment"][variable])
        assert set(re.findall(r"\w*PASSWORD", str(SERVICES[name]["environment"]))) == {variable}


def test_agents_are_told_where_the_endpoint_listens() -> None:
    url = make_url(SERVICES["agents"]["environment"]["AGENTRL_ENDPOINT_URL"])
    assert SERVICES["endpoint"]["environment"]["AGENTRL_ENDPOINT_URL"] == str(url)
    assert SERVICES["endpoint"]["command"][3:] == ["--host", "0.0.0.0", "--port", str(url.port)]
    assert SERVICES[str(url.host)]["networks"] == ["default", "inside"]


def test_a_rollout_worker_serves_agents_where_the_endpoint_s_container_reaches_it() -> None:
    assert SERVICES["rollout"]["environment"]["AGENTRL_SAMPLER_HOST"] == "auto"
    assert set(SERVICES["rollout"]["networks"]) & set(SERVICES["endpoint"]["networks"])


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


def test_gpu_file_gives_rollout_and_train_the_card_that_their_variables_name() -> None:
    devices = {name: GPU["services"][name]["deploy"]["resources"]["reservations"]["devices"] for name in ("rollout", "train")}
    assert {name: [shown(device["device_ids"][0]) for device in found] for name, found in devices.items()} == {
        "rollout": ["0"],
        "train": ["0"],
    }
    for name, (device,) in devices.items():
        assert re.findall(r"\$\{(\w+):-", device["device_ids"][0]) == [f"AGENTRL_{name.upper()}_GPU"]
        assert "count" not in device  # `count: 1` is the first card, for each service


@pytest.mark.parametrize("stack", [STACK, GPU], ids=["docker-compose.yml", "docker-compose.gpu.yml"])
def test_compose_v1_can_read_it_too(stack: dict[str, Any]) -> None:
    top = {key for key in stack if not key.startswith("x-")}
    assert top <= {"services", "networks", "volumes"}
    for service in stack["services"].values():
        assert not {"profiles", "develop", "extends", "secrets", "configs"} & set(service)
    assert "RUN --" not in DOCKERFILE
