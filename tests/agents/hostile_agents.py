"""Agents that do what agents may do, and what they may not. `tests/agents/test_processes.py` runs them."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.workflow.agents import Answer

SLEEPER = "import os, time; os.setsid(); time.sleep(600)"


def answers(task: Any, llm: Any) -> Answer:
    print("hello from", task.key)
    return Answer(f"{task.messages[0]['content']} {llm.model}", {"close": 0.5})


async def answers_later(task: Any, llm: Any) -> float:
    return 0.25


def nothing(task: Any, llm: Any) -> None:
    """Returns nothing."""


def words(task: Any, llm: Any) -> str:
    return "a text is an answer"


def a_list(task: Any, llm: Any) -> list[str]:
    return ["a list is nothing"]


def exits(task: Any, llm: Any) -> None:
    print("no license", flush=True)
    os._exit(3)


def raises(task: Any, llm: Any) -> None:
    raise ValueError("no such luck")


def cannot_connect(task: Any, llm: Any) -> None:
    raise ConnectionError("x" * 5000) from OSError(111, "Connection refused")


def leaves(task: Any, llm: Any) -> None:
    sys.exit(3)


def sleeps(task: Any, llm: Any) -> None:
    time.sleep(600)


def program_that_sleeps(task: Any, llm: Any) -> None:
    """Sleeps in a program, whose environment is its agent's."""
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=False)


def breaks_away(task: Any, llm: Any) -> None:
    """Leaves a grandchild in a session of its own, and ends."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    Path(task.metadata["note"]).write_text(str(child.pid))


def breaks_away_and_stays(task: Any, llm: Any) -> None:
    """Leaves descendants in sessions of their own, two of them without a parent, tells who its guardian is, and goes on."""
    twice = f"import subprocess, sys; [subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]) for _ in range(2)]"
    subprocess.run([sys.executable, "-c", twice], check=True)
    subprocess.Popen([sys.executable, "-c", SLEEPER])
    note = Path(task.metadata["note"])
    note.with_suffix(".new").write_text(str(os.getppid()))
    note.with_suffix(".new").rename(note)
    time.sleep(600)


def prints(task: Any, llm: Any) -> None:
    """Prints without end."""
    while True:
        os.write(1, b"x" * (1 << 20))


def allocates(task: Any, llm: Any) -> None:
    kept = []
    while True:
        kept.append(bytearray(b"x" * (16 << 20)))
        time.sleep(0.02)


def forks(task: Any, llm: Any) -> None:
    for _ in range(60):
        subprocess.Popen([sys.executable, "-c", SLEEPER])
    time.sleep(600)


def looks_around(task: Any, llm: Any) -> Answer:
    """What it can read of who started it: its own environment, and its parents'."""
    found, pid = [], os.getpid()
    while pid > 1:
        try:
            found.append(Path(f"/proc/{pid}/environ").read_text())
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        if len(found) == 3:  # itself, its guardian, its interpreter
            break
    return Answer(repr([*found, dict(os.environ)]))


def dies(task: Any, llm: Any) -> None:
    os.kill(os.getpid(), 9)


def many_rewards(task: Any, llm: Any) -> dict[str, float]:
    return {f"r{number}": 1.0 for number in range(1000)}


def infinite(task: Any, llm: Any) -> float:
    return float("inf")


_episodes: list[int] = []


def counts(task: Any, llm: Any) -> dict[str, float]:
    """Return how many episodes this process has run, and whether the process's environment is this episode's."""
    _episodes.append(os.getpid())
    print("episode", len(_episodes))
    return {"episodes": float(len(_episodes)), "own key": float(os.environ["OPENAI_API_KEY"] == llm.api_key)}


def counts_then_raises(task: Any, llm: Any) -> dict[str, float]:
    """Like `counts`, but every third episode raises an exception."""
    rewards = counts(task, llm)
    if len(_episodes) == 3:
        raise ValueError("the third")
    return rewards


def counts_then_dies(task: Any, llm: Any) -> dict[str, float]:
    """Like `counts`, but the process ends shortly after its first episode."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return counts(task, llm)


def answers_twice(task: Any, llm: Any) -> None:
    """Print the process id. Then send a second result into the socket of the first one."""
    print(os.getpid(), flush=True)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                data = json.dumps({"value": 1.0}).encode()
                os.write(descriptor, len(data).to_bytes(8, "little") + data)
