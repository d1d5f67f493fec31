"""The warm interpreter of an agent has made the first calls of the SDK that the agent's module imported."""

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.workers.agents import processes
from agentrl.workers.agents.processes import AgentServers, clean_environment
from tests.agents.an_sdk_agent import AT_THE_FIRST_CALL
from tests.agents.test_processes import order


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(processes, "servers", AgentServers())
    yield
    processes.servers.close()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    processes._certificates.cache_clear()
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_agent_server_imports_modules_of_first_call() -> None:
    report = processes.run(order(), "tests.agents.an_sdk_agent:looks", lambda: False)
    assert report is not None
    assert report.rewards == dict.fromkeys(AT_THE_FIRST_CALL, 1.0), report.error
    assert report.output == ""


class _Store:
    """A system whose certificates stand in a bundle and in a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self.bundle, self.folder = folder / "bundle.crt", folder / "certs"
        self.bundle.write_text("-----BEGIN CERTIFICATE-----\n" * count)
        self.folder.mkdir()
        for number in range(2):
            (self.folder / f"0000000{number}.0").write_text("")

    def paths(self) -> ssl.DefaultVerifyPaths:
        return ssl.DefaultVerifyPaths(None, None, "SSL_CERT_FILE", str(self.bundle), "SSL_CERT_DIR", str(self.folder))


def of_certificates(monkeypatch: pytest.MonkeyPatch, store: _Store, **environment: str) -> dict[str, str]:
    monkeypatch.setattr(ssl, "get_default_verify_paths", store.paths)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return {name: value for name, value in clean_environment().items() if name.startswith("SSL_")}


def test_agents_get_system_certificates_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Store(tmp_path, 2)
    assert of_certificates(monkeypatch, store) == {"SSL_CERT_DIR": str(store.folder)}
    link = tmp_path / "link.crt"
    link.symlink_to(store.bundle)
    assert of_certificates(monkeypatch, store, SSL_CERT_FILE=str(link)) == {"SSL_CERT_DIR": str(store.folder)}
    assert of_certificates(monkeypatch, store, SSL_CERT_DIR=f"{store.folder}/") == {"SSL_CERT_DIR": str(store.folder)}


def test_agents_keep_the_operators_own_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.crt"
    own.write_text("")
    environment = {"SSL_CERT_FILE": str(own)}
    assert of_certificates(monkeypatch, _Store(tmp_path, 2), **environment) == environment


def test_agents_do_not_get_a_folder_that_lacks_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_certificates(monkeypatch, _Store(tmp_path, 3)) == {}


def test_clients_with_system_certificates_trust_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = clean_environment().get("SSL_CERT_DIR")
    if not folder:
        pytest.skip("this system has no folder of certificates")
    bundle = ssl.create_default_context(cafile=ssl.get_default_verify_paths().openssl_cafile)
    names = {certificate["serialNumber"] for certificate in bundle.get_ca_certs()}
    in_folder = set()
    for name in os.listdir(folder):
        if processes._HASHED.fullmatch(name):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(Path(folder, name))
            in_folder |= {certificate["serialNumber"] for certificate in context.get_ca_certs()}
    assert names <= in_folder
