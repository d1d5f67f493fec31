"""The container files keep their promises: which services there are, who builds, what the tools may do. `make compose-test`
runs them.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import make_url

from agentrl.workers.stack.metrics import port_of
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import migrate

ROOT = Path(__file__).parents[2]
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
MONITORING: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.monitoring.yml").read_text())
SCRAPED: dict[str, Any] = yaml.safe_load((ROOT / "prometheus.yml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
OURS = ("control", "rollout", "train", "tools", "endpoint", "agents", "ui")
LOCKED = ("tools", "agents")
EXAMPLE = (ROOT / ".env.example").read_text()
PASSWORDS = (
    "POSTGRES_PASSWORD",
    "AGENTRL_READER_PASSWORD",
    "AGENTRL_TOOLS_PASSWORD",
    "AGENTRL_AGENTS_PASSWORD",
    "REDIS_PASSWORD",
)
NOT_IN_CONTAINERS = {
    "redis_server",
    "broker_password",
    "idle_stop_seconds",
    "endpoint_port",
    "sandbox_uids",
    "sandbox_image",
    "database_reader_url",
}
"""Settings of the embedded stack, of root, of docker as a sandbox, and those that compose makes of a password in .env."""


def test_compose_has_two_servers_and_one_service_per_role() -> None:
    assert set(SERVICES) == {"postgres", "redis", *OURS}
    roles = ("rollout", "train", "tools", "endpoint", "agents")
    assert {name: SERVICES[name]["command"][:3] for name in roles} == {name: ["agentrl", "worker", name] for name in roles}
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["ui"]


@pytest.mark.parametrize("name", LOCKED)
def test_compose_locks_down_services_that_run_model_code(name: str) -> None:
    tools = SERVICES[name]
    assert tools["volumes"] == ["./work:/work:ro"]
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


def test_compose_gives_reader_password_to_control_only() -> None:
    assert [name for name in OURS if "AGENTRL_READER_PASSWORD" in SERVICES[name]["environment"]] == ["control"]


def test_compose_services_log_in_by_role_with_own_password() -> None:
    logins = {name: make_url(SERVICES[name]["environment"]["AGENTRL_DATABASE_URL"]) for name in OURS}
    roles = {"tools": migrate.TOOLS_ROLE, "agents": migrate.AGENTS_ROLE, "ui": migrate.READER_ROLE}
    assert {name: login.username for name, login in logins.items()} == dict.fromkeys(OURS, "agentrl") | roles
    for name, role in roles.items():
        variable = f"AGENTRL_{role.removeprefix('agentrl_').upper()}_PASSWORD"
        environment = SERVICES[name]["environment"]
        assert environment["PGPASSWORD"] == SERVICES["control"]["environment"][variable]
        assert set(re.findall(r"\$\{(\w+PASSWORD)", str(environment))) - {"REDIS_PASSWORD"} == {variable}


def test_compose_passwords_have_no_default_and_are_in_no_url() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert set(re.findall(r"\$\{(\w*PASSWORD)", text)) == set(PASSWORDS)
    assert all(f"${{{name}:?Type: make .env}}" in text for name in PASSWORDS)
    assert {make_url(SERVICES[name]["environment"]["AGENTRL_DATABASE_URL"]).password for name in OURS} == {None}


def test_compose_redis_password_is_known_to_queue_services() -> None:
    redis = SERVICES["redis"]
    password = redis["command"][redis["command"].index("--requirepass") + 1]
    assert password == redis["environment"]["REDISCLI_AUTH"]
    known = {name for name in OURS if SERVICES[name]["environment"].get("AGENTRL_BROKER_PASSWORD") == password}
    assert known == set(OURS) - {"ui"}
    assert {"AGENTRL_BROKER_URL", "REDIS_PASSWORD"}.isdisjoint(SERVICES["ui"]["environment"])


def test_compose_env_target_generates_passwords_once(tmp_path: Path) -> None:
    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    texts = []
    for _ in range(2):
        subprocess.run(["make", ".env"], cwd=tmp_path, check=True, capture_output=True)
        texts.append((tmp_path / ".env").read_text())
    assert texts[0] == texts[1], "a file that is there stays"
    values = dict(line.split("=", 1) for line in texts[0].splitlines() if line and not line.startswith("#"))
    assert set(values) == set(PASSWORDS)
    assert all(re.fullmatch(r"[0-9a-f]{36}", value) for value in values.values())
    assert len(set(values.values())) == len(PASSWORDS)
    assert re.sub(r"(?m)(?<=PASSWORD=)[0-9a-f]+$", "", texts[0]) == EXAMPLE
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    assert (tmp_path / "work").is_dir()


def test_env_example_names_each_setting_as_the_code_describes_it() -> None:
    described = dict(reversed(pair) for pair in re.findall(r"(?m)^# (.*)\n#?(\w+=.*)$", EXAMPLE))
    fixed = {name for service in OURS for name, value in SERVICES[service]["environment"].items() if value and "$" not in value}
    fixed |= set(re.findall(r"\bAGENTRL_\w+", DOCKERFILE))
    fields = {f"AGENTRL_{name.upper()}": (name, field) for name, field in Settings.model_fields.items()}
    expected = {
        f"{variable}={'' if field.default is None else field.default}": field.description
        for variable, (name, field) in fields.items()
        if variable not in fixed and name not in NOT_IN_CONTAINERS
    }
    assert {line: described.get(line) for line in expected} == expected


def test_env_example_variables_reach_a_service_or_build() -> None:
    named = set(re.findall(r"(?m)^#?(\w+)=", EXAMPLE))
    text = "".join(
        (ROOT / name).read_text() for name in ("docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.monitoring.yml")
    )
    passed = {name for service in OURS for name, value in SERVICES[service]["environment"].items() if value is None}
    assert named == passed | set(re.findall(r"\$\{(\w+)", text))


def test_compose_passes_settings_to_their_services() -> None:
    passed = {service: set(SERVICES[service]["environment"]) for service in OURS}
    everywhere = set(OURS) - {"ui"}
    for name in ("AGENTRL_GSM8K_DIR", "AGENTRL_SEARCH", "PYTHONPATH"):
        assert {service for service in OURS if name in passed[service]} == everywhere
    for name in ("HF_TOKEN", "AGENTRL_ENGINE_KEY", "AWS_SECRET_ACCESS_KEY"):
        assert {service for service in OURS if name in passed[service]} == {"control", "rollout", "train"}
    assert {service for service in OURS if "./work:/work:ro" in SERVICES[service]["volumes"]} == everywhere


def test_compose_services_have_healthcheck_and_log_rotation() -> None:
    for name, service in SERVICES.items():
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, name
        assert service["healthcheck"]["test"][0] == "CMD", name
    workers = [name for name in OURS if name != "ui"]
    for name in workers:
        assert SERVICES[name]["healthcheck"]["test"] == [
            "CMD",
            "test",
            "-f",
            SERVICES[name]["environment"]["AGENTRL_READY_FILE"],
        ]


def test_compose_publishes_page_on_this_host_at_its_port() -> None:
    port = "${UI_PORT:-7788}"
    assert SERVICES["ui"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert SERVICES["ui"]["command"] == ["agentrl", "ui", "--host", "0.0.0.0", "--port", port, "--no-browser"]
    assert SERVICES["ui"]["volumes"] == ["data:/data:ro"]


def test_compose_agents_know_endpoint_address() -> None:
    url = make_url(SERVICES["agents"]["environment"]["AGENTRL_ENDPOINT_URL"])
    assert SERVICES["endpoint"]["environment"]["AGENTRL_ENDPOINT_URL"] == str(url)
    assert SERVICES["endpoint"]["command"][3:] == ["--host", "0.0.0.0", "--port", str(url.port)]
    assert SERVICES[str(url.host)]["networks"] == ["default", "inside"]


def test_compose_rollout_worker_is_reachable_by_endpoint() -> None:
    assert SERVICES["rollout"]["environment"]["AGENTRL_SAMPLER_HOST"] == "auto"
    assert set(SERVICES["rollout"]["networks"]) & set(SERVICES["endpoint"]["networks"])


def shown(text: str) -> str:
    """The text with what its variables are where nobody sets them."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


def test_compose_variables_are_all_settings() -> None:
    known = {f"AGENTRL_{name.upper()}" for name in Settings.model_fields}
    given = {name for service in OURS for name in SERVICES[service]["environment"] if name.startswith("AGENTRL_")}
    assert given | set(re.findall(r"\bAGENTRL_\w+", DOCKERFILE)) <= known


def test_compose_builds_one_shared_image() -> None:
    assert {SERVICES[name]["image"] for name in OURS} == {"agentrl"}
    assert [name for name in SERVICES if "build" in SERVICES[name]] == ["control"]
    assert set(SERVICES["control"]["build"]["args"]) == set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_compose_gpu_file_only_extends_existing_services() -> None:
    assert GPU["services"]["control"] == {"build": {"args": {"TORCH_INDEX": ""}}}
    assert {name for name in GPU["services"] if "deploy" in GPU["services"][name]} == {"rollout", "train"}
    assert set(GPU["services"]) <= set(SERVICES)


def test_compose_gpu_file_gives_rollout_and_train_their_card() -> None:
    devices = {name: GPU["services"][name]["deploy"]["resources"]["reservations"]["devices"] for name in ("rollout", "train")}
    assert {name: [shown(device["device_ids"][0]) for device in found] for name, found in devices.items()} == {
        "rollout": ["0"],
        "train": ["0"],
    }
    for name, (device,) in devices.items():
        assert re.findall(r"\$\{(\w+):-", device["device_ids"][0]) == [f"AGENTRL_{name.upper()}_GPU"]
        assert "count" not in device  # `count: 1` is the first card, for each service


def test_compose_monitoring_scrapes_each_worker_port() -> None:
    added = {name: service for name, service in MONITORING["services"].items() if name != "prometheus"}
    assert set(added) == set(OURS) - {"ui"}
    (port,) = {service["environment"]["AGENTRL_METRICS_PORT"] for service in added.values()}
    assert {service["environment"]["AGENTRL_METRICS_HOST"] for service in added.values()} == {"0.0.0.0"}
    where = Settings(metrics_port=port)
    (job,) = SCRAPED["scrape_configs"]
    found = {tuple(each["names"]): each["port"] for each in job["dns_sd_configs"]}
    assert found == {(name,): port_of(where, [name]) for name in added}


def test_compose_publishes_prometheus_on_this_host_only() -> None:
    prometheus = MONITORING["services"]["prometheus"]
    assert [port.partition(":")[0] for port in prometheus["ports"]] == ["127.0.0.1"]
    assert "./prometheus.yml:/etc/prometheus/prometheus.yml:ro" in prometheus["volumes"]
    assert set(prometheus["networks"]) == set(STACK["networks"]) | {"default"}


@pytest.mark.parametrize(
    "stack",
    [STACK, GPU, MONITORING],
    ids=["docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.monitoring.yml"],
)
def test_compose_files_are_readable_by_v1(stack: dict[str, Any]) -> None:
    top = {key for key in stack if not key.startswith("x-")}
    assert top <= {"services", "networks", "volumes"}
    for service in stack["services"].values():
        assert not {"profiles", "develop", "extends", "secrets", "configs"} & set(service)
    assert "RUN --" not in DOCKERFILE
