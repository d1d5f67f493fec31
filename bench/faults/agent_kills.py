"""Kills of everything that a run with agents runs on: its workers, its endpoint, its Redis, the agents themselves.

`python -m bench.faults.agent_kills [KILLS]` (`make disturbed-agents`) plays a run twice on the embedded stack, left alone and
struck, and says whether the tokens that agents got, what was trained on and all weights are the same. The agent is a program. A
struck agent is answered from its record. `tests/workers/test_agent_kills.py` does it in small.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import text

from bench.faults.record import whole_turns
from tests.support.real_stack import Stack, embedded_stack
from tests.support.small_models import tiny_random

ROOT = Path(__file__).parents[2]
AGENT = f"cmd:{sys.executable} {ROOT / 'tests' / 'support' / 'patient_agent.py'}"
BOTH = "rollout,train and agents"
"""The workers that sample and those that run agents, at the same moment."""
RUN = (
    *("--dataset", "arithmetic", "--epochs", "1", "--group-size", "4", "--tasks-per-iteration", "2", "--max-new-tokens", "24"),
    *("-s", "hooks=[tests.support.parity_hook:Lucky]", "-s", "model.numerics=exact", "--agent", AGENT, "--agent-unsafe"),
)
LEASE_SECONDS = "2"
PAUSE_SECONDS = (0.1, 1.0)
ROLES = ("rollout,train", "endpoint", "agents", "agent", "agent", BOTH, "control")
KILLS = 36
TOKENS = """
    SELECT i.number AS iteration, t.key, e.sample, e.status, e.stop_reason, e.reward,
        s.number, s.parent_step, s.shared_tokens, s.delivered, coalesce(p.prompt_ids, k.prompt_ids), k.sampled_ids
    FROM episodes e JOIN runs r ON r.id = e.run_id JOIN iterations i ON i.id = e.iteration_id JOIN tasks t ON t.id = e.task_id
    JOIN steps s ON s.episode_id = e.id AND s.attempt = e.attempt JOIN step_tokens k ON k.step_id = s.id
    LEFT JOIN step_tokens p ON p.step_id = s.prompt_step_id
    WHERE r.name = :run ORDER BY i.number, t.key, e.sample, s.number"""
WEIGHTS = "SELECT version, p.sha256 FROM policies p JOIN runs r ON r.id = p.run_id WHERE r.name = :run ORDER BY version"
PROGRESS = """
    SELECT count(*), count(*) FILTER (WHERE e.finished_at IS NULL) FROM steps s
    JOIN episodes e ON e.id = s.episode_id AND e.attempt = s.attempt WHERE s.run = :run"""
REPLAYED = """
    SELECT count(*) FROM steps WHERE run = :run AND replayed"""
MISMATCHES = """
    SELECT count(*) FROM agent_attempts WHERE run = :run AND error_class = 'mismatch'"""
USED = """
    SELECT count(*), count(DISTINCT episode_id) FROM consumptions c JOIN runs r ON r.id = c.run_id WHERE r.name = :run"""


def record(stack: Stack, run: str) -> dict[str, Any]:
    """Tokens of every episode, as its agent got them in the attempt that counts, how it ended, the weights of each version."""
    with stack.database.read() as tx:
        tokens, weights, used = (tx.execute(text(query), {"run": run}).all() for query in (TOKENS, WEIGHTS, USED))
    episodes = {
        key: [hashlib.sha256(turn).hexdigest()[:12] for turn in whole_turns(row[6:] for row in rows)]
        for key, rows in groupby(tokens, key=lambda row: tuple(row[:6]))
    }
    return {"episodes": episodes, "weights": [tuple(row) for row in weights], "used": tuple(used[0])}


def strike(stack: Stack, victim: str) -> bool:
    """Kills it; False where it is not there now."""
    if victim == "redis":
        return _kill_redis(stack)
    if victim == BOTH:
        first, second = (strike(stack, role) for role in BOTH.split(" and "))
        return first and second
    pids = _guardians(stack) if victim == "agent" else stack.workers(victim)
    for pid in list(pids)[:1]:
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _kill_redis(stack: Stack) -> bool:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if (b"redis-server" in words or b"valkey-server" in words) and str(stack.home).encode() in words:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _guardians(stack: Stack) -> list[int]:
    """Processes of agents: the youngest ones that an agents worker's interpreter forked."""
    workers = stack.workers("agents")
    families = {pid: _parents(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    return sorted((pid for pid, above in families.items() if workers & set(above)), key=lambda pid: -len(families[pid]))


def _parents(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


def struck(stack: Stack, run: str, kills: int, seed: int, steps: int) -> list[str]:
    """Strikes so often, spread evenly over the run's steps and each time in the middle of an episode; who was struck."""
    dice, victims = random.Random(seed), list[str]()
    while len(victims) < kills and _status(stack, run) == "running":
        time.sleep(dice.uniform(*PAUSE_SECONDS))
        with stack.database.read() as tx:
            stored, of_open_episodes = tx.execute(text(PROGRESS), {"run": run}).one()
        if not of_open_episodes or stored < steps * len(victims) / kills:
            continue
        victim = "redis" if len(victims) == kills // 2 else dice.choice(ROLES)
        if strike(stack, victim):
            victims.append(victim)
    stack.wait_for(run)
    return victims


def _status(stack: Stack, run: str) -> str:
    with stack.database.read() as tx:
        return str(tx.execute(text("SELECT status FROM runs WHERE name = :run"), {"run": run}).scalar_one_or_none())


def main(kills: int) -> int:
    """Plays both runs; returns the exit code."""
    with TemporaryDirectory(prefix="arl-", dir="/tmp") as folder, embedded_stack(Path(folder), idle_seconds="3600") as stack:
        prepare(stack)
        model = str(tiny_random(Path(folder) / "model"))
        words = [*RUN, "--max-tasks", str(kills), "--model", model]
        began, load = time.monotonic(), os.getloadavg()[1]
        stack.agentrl("submit", *words, "--name", "calm", "--detach")
        stack.wait(lambda: _status(stack, "calm") == "done", "calm", 1800)
        calm = time.monotonic() - began
        stack.agentrl("submit", *words, "--name", "struck", "--detach")
        with stack.database.read() as tx:
            steps = tx.execute(text(PROGRESS), {"run": "calm"}).one()[0]
        victims = struck(stack, "struck", kills, seed=0, steps=steps)
        records = [record(stack, name) for name in ("calm", "struck")]
        with stack.database.read() as tx:
            lost = tx.execute(text("SELECT count(*) FROM agent_attempts WHERE run = 'struck' AND status = 'lost'")).scalar_one()
            replayed, mismatches = (tx.execute(text(query), {"run": "struck"}).scalar_one() for query in (REPLAYED, MISMATCHES))
    same = {part: records[0][part] == records[1][part] for part in records[0]}
    said = {
        "kills": {name: victims.count(name) for name in sorted(set(victims))},
        "seconds": {"calm": round(calm, 1), "struck": round(time.monotonic() - began - calm, 1)},
        "load": load,
        "agents_lost": lost,
        "steps_replayed": replayed,
        "mismatches": mismatches,
        "episodes": len(records[0]["episodes"]),
        "versions": len(records[0]["weights"]),
        "same": same,
    }
    print(json.dumps(said, indent=1))
    file = Path("build/disturbed_agents.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(said, indent=1))
    return int(not all(same.values()) or len(victims) < kills or not replayed or mismatches > 0)


def prepare(stack: Stack) -> None:
    """The environment of a stack that is to be struck."""
    stack.environment |= {"PYTHONPATH": str(ROOT), "AGENTRL_LEASE_SECONDS": LEASE_SECONDS}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else KILLS))
