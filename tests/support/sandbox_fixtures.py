"""Sandboxes for the tests: a user range of this process's own, and who is still alive in it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from agentrl.workflow.errors import SandboxUnavailable
from agentrl.workflow.sandbox import CodeResult, uid_pool
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.find import find_bwrap
from agentrl.workflow.sandbox.launch import Launch
from agentrl.workflow.settings import Settings
from tests.conftest import missing

FIRST = 1_000_000 + 50 * (os.getpid() % 100_000)
os.environ.setdefault("AGENTRL_SANDBOX_UIDS", f"{FIRST}-{FIRST + 49}")  # for the processes that a test starts, too
SETTINGS = Settings()
UIDS = uid_pool.uid_range(SETTINGS.sandbox_uids)
MODES = ("cold", "warm")


@lru_cache(maxsize=1)
def machine() -> Launch:
    """What this machine allows; the test skips, or fails in CI, where it allows nothing."""
    try:
        found = find_bwrap(SETTINGS)
    except SandboxUnavailable as error:
        missing(f"bubblewrap ({error})")
        raise
    assert isinstance(found, Boxed)
    found.close()
    return found.launch


@contextmanager
def boxed(mode: str) -> Iterator[Boxed]:
    """bwrap on this machine, cold or with a zygote; at the end nothing of it may be alive."""
    if mode == "warm" and not machine().nests:
        missing("a sandbox that nests namespaces")
    sandbox = Boxed(replace(machine(), nests=mode == "warm"))
    yield sandbox
    sandbox.close()
    assert alive() == []


def result_with_a_core(run: Callable[[], CodeResult]) -> CodeResult:
    """The first result of `run` that was not starved: what a busy machine starves runs again here, as it does in an episode."""
    return next(result for _ in range(5) if (result := run()).status != "starved")


def alive() -> list[str]:
    """The processes of this range's users, by name; as an ordinary user: ours in other namespaces of process ids."""
    found = []
    ours = os.readlink("/proc/self/ns/pid")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            user = folder.stat().st_uid
            mine = user in UIDS if os.geteuid() == 0 else user == os.geteuid() and os.readlink(folder / "ns/pid") != ours
            if mine and b"\nState:\tZ" not in (folder / "status").read_bytes():
                found.append((folder / "comm").read_text(errors="replace").strip())
        except OSError:
            continue
    return found
