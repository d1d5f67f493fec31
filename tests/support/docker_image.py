"""A docker for the tests: the machine's own daemon, or a private one; an image made without a network."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import forbidden

IMAGE = "agentrl-sandbox-test"
PROGRAMS = ("/bin/sh", "/bin/sleep")


@contextmanager
def docker(folder: Path) -> Iterator[tuple[str, ...]]:
    """The docker command; without a daemon the test skips, in CI too: it runs as root, as only the machine's owner allows."""
    if shutil.which("docker") is None:
        forbidden("docker")
    if answers(("docker",)):
        yield ("docker",)
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        forbidden("a docker daemon")
    socket = f"unix://{folder}/docker.sock"
    words = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    words += ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--host", socket]
    words += ["--shutdown-timeout", "1"]  # that it gives containers which are told to stop, at its own end
    with open(folder / "log", "wb") as log:
        daemon = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    command = ("docker", "--host", socket)
    while not answers(command):
        if daemon.poll() is not None:
            forbidden(f"a docker daemon that starts ({(folder / 'log').read_text()[-300:]})")
        time.sleep(0.05)
    try:
        yield command
    finally:
        daemon.terminate()
        daemon.wait()


def answers(command: tuple[str, ...]) -> bool:
    return subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0


@contextmanager
def image(command: tuple[str, ...], folder: Path) -> Iterator[str]:
    """An image with /usr/bin/python3, its library and what they link to."""
    python = Path("/usr/bin/python3").resolve()
    asked = [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"]
    library = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    files = [*map(str, (python, "/usr/bin/python3")), library, *PROGRAMS]
    linked = subprocess.run(
        ["ldd", *(file for file in files if file != library), *map(str, Path(library).rglob("*.so"))],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    files += sorted({word for word in linked if word.startswith("/") and not word.endswith(":") and Path(word).exists()})
    left_out = ["--exclude=__pycache__", "--exclude=test", "--exclude=config-*"]
    archive = folder / "image.tar"
    subprocess.run(["tar", "-chf", archive, "-C", "/", *left_out, *(file.lstrip("/") for file in files)], check=True)
    subprocess.run([*command, "import", archive, IMAGE], check=True, capture_output=True)
    yield IMAGE
    subprocess.run([*command, "image", "rm", "--force", IMAGE], check=True, capture_output=True)
