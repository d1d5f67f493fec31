"""What a run left behind, as plain values, and what is wrong with it: the invariants I1 to I6.

- I1 every planned episode, group and iteration ended exactly once, as without the fault; every call is answered, and one that
  must not run twice has not
- I2 no episode was consumed twice
- I3 policy k came from exactly the episodes of iteration k - 1
- I4 token ids and weights are bit for bit those of the undisturbed run
- I5 no process, temporary file, unpublished checkpoint or live lease is left
- I6 the views tell the true state
"""

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from agentrl.workflow.tables.step_values import JOIN_PROMPT_IDS, PROMPT_IDS
from bench.faults import world

Record = dict[str, Any]
"""JSON: `episodes`, `consumed` and `policies` by their names, `wrong`: what needs no comparison to be wrong."""

IN_TOOLS = ("start_once", "run_tool", "program", "record_result", "wake", "call")
"""Points of the tools worker. What it leaves of the once-only calls it was running is unknown, and the model is told so."""

_EPISODES = """
    SELECT e.id, i.number || ' ' || t.key || ' ' || e.sample AS name, e.status, e.stop_reason, e.reward, e.steps
        - (SELECT count(*) FROM steps s WHERE s.episode_id = e.id AND s.attempt = e.attempt AND NOT s.delivered) AS steps
    FROM episodes e JOIN iterations i ON i.id = e.iteration_id JOIN tasks t ON t.id = e.task_id"""

_TOKENS = f"""
    SELECT s.number, s.parent_step, s.shared_tokens, s.delivered, {PROMPT_IDS}, t.sampled_ids
    FROM steps s JOIN episodes e ON e.id = s.episode_id AND e.attempt = s.attempt JOIN step_tokens t ON t.step_id = s.id
    {JOIN_PROMPT_IDS}
    WHERE e.id = ? ORDER BY s.number"""
"""Of the attempt that counts: an agent that is lost begins anew."""

ID_BYTES = 4

_FAILED = """
    SELECT episode_id, step, tool, error_class, substr(result, 1, 200) FROM tool_calls
    WHERE error_class IS NOT NULL AND status <> 'unknown_outcome'"""

_COUNTS = {
    "I1: {} groups are not done": "SELECT count(*) FROM groups WHERE status <> 'done'",
    "I1: {} iterations are not done": "SELECT count(*) FROM iterations WHERE status <> 'done'",
    "I1: {} episodes were scored twice": (
        "SELECT count(*) FROM (SELECT 1 FROM rewards GROUP BY episode_id, part, step HAVING count(*) > 1)"
    ),
    "I1: {} calls have no result": "SELECT count(*) FROM tool_calls WHERE result IS NULL AND status <> 'unobserved'",
    "I1: {} agents have not ended": (
        "SELECT count(*) FROM agent_attempts a JOIN episodes e ON e.id = a.episode_id AND e.attempt = a.attempt"
        " WHERE a.status <> 'ended'"
    ),
    "I1: {} agents of attempts that are over seem at work": (
        "SELECT count(*) FROM agent_attempts a JOIN episodes e ON e.id = a.episode_id AND e.attempt <> a.attempt"
        " WHERE a.status <> 'lost'"
    ),
    "I1: {} once-only calls were started twice": "SELECT count(*) FROM tool_calls WHERE effects = 'once' AND starts > 1",
    "I2: {} episodes were consumed twice": (
        "SELECT count(*) FROM (SELECT 1 FROM consumptions GROUP BY episode_id HAVING count(*) > 1)"
    ),
    "I3: {} episodes were consumed by another iteration": (
        "SELECT count(*) FROM consumptions c JOIN episodes e ON e.id = c.episode_id WHERE e.iteration_id <> c.iteration_id"
    ),
    "I3: {} steps are of another policy than the iteration's": (
        "SELECT count(*) FROM steps s JOIN episodes e ON e.id = s.episode_id JOIN iterations i ON i.id = e.iteration_id"
        " WHERE s.policy_id <> i.policy_id"
    ),
    "I5: {} groups are held": "SELECT count(*) FROM groups WHERE lease_until > :now",
    "I5: {} iterations are held": "SELECT count(*) FROM iterations WHERE lease_until > :now",
    "I5: {} agents are held": "SELECT count(*) FROM agent_attempts WHERE lease_until > :now AND status = 'running'",
    "I5: {} services are held for long": "SELECT count(*) FROM service_leases WHERE lease_until > :now + 60000",
    "I6: {} runs are not shown as done": "SELECT count(*) FROM v_runs WHERE status <> 'done' OR iterations_done <> iterations",
    "I6: {} iterations are shown with other episodes than planned": (
        "SELECT count(*) FROM v_iterations WHERE trainable <> episodes "
        f"OR episodes <> {world.EPISODES} * groups OR groups <> {world.GROUPS} + more_groups"
    ),
}


def read(home: Path) -> Record:
    """What lies in the data folder of a run that is over."""
    with closing(sqlite3.connect(home / "agentrl.db")) as db:
        db.row_factory = sqlite3.Row
        found = list(db.execute(_EPISODES))
        names = {row["id"]: row["name"] for row in found}
        return {
            "episodes": {
                row["name"]: [row["status"], row["stop_reason"], row["reward"], row["steps"], _tokens(db, row["id"])]
                for row in found
            },
            "consumed": {names[row["episode_id"]]: row["advantage"] for row in db.execute("SELECT * FROM consumptions")},
            "policies": {str(row["version"]): _policy(row) for row in db.execute("SELECT * FROM policies")},
            "calls": _one(db, "SELECT count(*) FROM tool_calls WHERE kind = 'call' AND error_class IS NULL"),
            "grades": _one(db, "SELECT count(*) FROM tool_calls WHERE kind = 'grade' AND error_class IS NULL"),
            "unknown": _one(db, "SELECT count(*) FROM tool_calls WHERE status = 'unknown_outcome'"),
            "failed": [list(row) for row in db.execute(_FAILED)],
            "wrong": [*_counted(db), *_noted(db, home), *_left(db, home)],
        }


def violations(record: Record, undisturbed: Record, fault: str) -> list[str]:
    """What is wrong with the record; empty where all invariants hold."""
    wrong = list(record["wrong"])
    for invariant, part in (("I1, I4", "episodes"), ("I2", "consumed"), ("I3, I4", "policies")):
        mine, theirs = record[part], undisturbed[part]
        wrong += [
            f"{invariant}: {part} {name}: {mine.get(name)} instead of {theirs.get(name)}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]
    allowed = world.GROUPS * world.EPISODES if any(part.startswith(IN_TOOLS) for part in fault.split(",")) else 0
    if record["grades"] != undisturbed["grades"]:
        wrong.append(f"I1: {record['grades']} episodes were judged instead of {undisturbed['grades']}")
    if record["unknown"] > allowed:
        wrong.append(f"I1: the outcome of {record['unknown']} calls is unknown")
    return wrong + [f"calls failed: {record['failed']}"] * bool(wrong and record["failed"])


def complete(record: Record, env: str = "world") -> bool:
    """Whether an undisturbed run has all that there is to disturb: two turns everywhere, and weights that change each time."""
    episodes, planned = record["episodes"].values(), world.planned(env)
    kinds = [kind for kind, *_ in record["policies"].values()]
    return (
        len(episodes) == planned
        and record["calls"] == (0 if env == "agent" else planned * world.TURNS)
        and record["grades"] == planned
        and all(status == "done" and steps == world.TURNS for status, _, _, steps, _ in episodes)
        and kinds == ["base", *["trained"] * (world.AGENT_ITERATIONS if env == "agent" else world.ITERATIONS)]
    )


def _one(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query, {"now": int(time.time() * 1000)} if ":now" in query else {}).fetchone()[0])


def _tokens(db: sqlite3.Connection, episode: int) -> str:
    return hashlib.sha256(b"|".join(whole_turns(db.execute(_TOKENS, [episode])))).hexdigest()[:16]


def whole_turns(steps: Iterable[Sequence[Any]]) -> list[bytes]:
    """The ids of each turn that was delivered, its whole prompt before it: what its agent got, however it is stored.

    Args:
        steps: of an episode, in order: (number, parent's number, tokens shared with its line, delivered, prompt, sampled).
    """
    whole: dict[int | None, bytes] = {None: b""}
    given = []
    for number, parent, shared, delivered, prompt, sampled in steps:
        before = whole[parent]
        whole[number] = (before if shared is None else before[: ID_BYTES * shared]) + prompt + sampled
        given += [whole[number] + b"%d" % len(sampled)] * bool(delivered)
    return given


def _policy(row: sqlite3.Row) -> list[str]:
    """Kind, the hash that was recorded, and the hashes of what lies there: the weights, and the critic where there is one."""
    return [row["kind"], row["sha256"], *(_hash(row["path"], name) for name in ("model.safetensors", "critic.safetensors"))]


def _hash(folder: str, name: str) -> str:
    file = Path(folder) / name
    return hashlib.sha256(file.read_bytes()).hexdigest() if folder and file.is_file() else ""


def _counted(db: sqlite3.Connection) -> Iterator[str]:
    for sentence, query in _COUNTS.items():
        found = _one(db, query)
        if found:
            yield sentence.format(found)


def _noted(db: sqlite3.Connection, home: Path) -> Iterator[str]:
    """The once-only tool really ran as often as the rows say: what it refused or never answered may not have run."""
    file = home / world.NOTES
    ran = len(file.read_bytes()) if file.exists() else 0
    query = "SELECT count(*) FROM tool_calls WHERE effects = 'once' AND starts > 0 AND (error_class IS NULL OR {})"
    answered, started = (_one(db, query.format(others)) for others in ("0", "1"))
    if not answered <= ran <= started:
        yield f"I1: {answered} once-only calls are answered and {started} were started, but the tool ran {ran} times"


def _left(db: sqlite3.Connection, home: Path) -> Iterator[str]:
    published = {Path(row[0]).name for row in db.execute("SELECT path FROM policies WHERE path <> ''")}
    there = {path.name for path in (home / "runs" / world.RUN).iterdir() if not path.is_symlink()}
    nowhere = [path.name for path in (home / "runs" / world.RUN).iterdir() if not path.exists()]
    if nowhere:
        yield f"I5: links that lead nowhere {nowhere}"
    if there != published:
        yield f"I5: checkpoints left over {sorted(there - published)}, missing {sorted(published - there)}"
    known = {"agentrl.db", "agentrl.db-wal", "agentrl.db-shm", "runs", "stack", world.NOTES}
    strange = {path.name for path in home.iterdir()} - known | {path.name for path in (home.parent / "tmp").iterdir()}
    if strange:
        yield f"I5: files left over {sorted(strange)}"
