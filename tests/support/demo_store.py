"""Makes what `agentrl ui --demo` shows: real runs of a tiny model on this machine, and their rows packed without its folders.

`make demo`: two or three minutes, into workers/page/demo_data.
"""

import lzma
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from agentrl.workers.page.demo import DATA, MODEL, PACKED, TOKENIZER

HOOK = '''"""What the demo's runs note about their episodes."""

import agentrl


class Remarks(agentrl.Hook):
    def on_rollout_end(self, episode):
        calls = sum(len(step.message.tool_calls) for step in episode.steps)
        if episode.reward == 0 and episode.steps:
            wanted = {"calls": calls, "answer": episode.final_answer, "wanted": episode.task.reference}
            agentrl.emit_annotation(wanted, name="missed")
        return {}
'''
ELSEWHERE = "/demo"
"""What stands for the folder in which the runs were made."""
SFT = ("sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "200")
RUN = (
    *("submit", "--dataset", "arithmetic", "--model", "tiny", "--max-tasks", "24", "--group-size", "6"),
    *("--tasks-per-iteration", "6", "--learning-rate", "4e-4", "-s", "update.decay=cosine", "--hook", "demo_hook:Remarks"),
)
GRPO = (*RUN, "--name", "demo", "--iterations", "20", "--eval-every", "5", "-s", "eval.tasks=32", "--wait")
RLOO = (*RUN, "--name", "demo-rloo", "--algorithm", "rloo", "--iterations", "8", "--seed", "1", "--wait")
FORKED = """
    SELECT e.id FROM v_episodes e WHERE e.run = 'demo' AND e.reward < 1 AND e.steps >= 2 AND e.tool_calls >= 1
    ORDER BY e.iteration DESC, e.id LIMIT 1"""


def main() -> None:
    """Makes the runs, and packs them."""
    with tempfile.TemporaryDirectory(prefix="arl-demo-", dir="/tmp") as folder:
        home = Path(folder) / "home"
        (Path(folder) / "demo_hook.py").write_text(HOOK)
        try:
            _make_runs(home)
        finally:
            _agentrl(home, "down")
        pack(home / "agentrl.db", DATA, home)
        shutil.copy(home / "models" / MODEL / TOKENIZER, DATA)
    print(f"{DATA / PACKED}: {(DATA / PACKED).stat().st_size:,} bytes")


def _make_runs(home: Path) -> None:
    for words in (SFT, GRPO, RLOO):
        _agentrl(home, *words)
    with closing(sqlite3.connect(home / "agentrl.db")) as connection:
        (episode,) = connection.execute(FORKED).fetchone()
    _agentrl(home, "fork", str(episode), "--step", "1", "-n", "6", "--name", "demo-fork", "--wait")
    _agentrl(home, "tag", "demo", "first-look")
    _agentrl(home, "tag", "demo-rloo", "first-look", "baseline")
    _agentrl(
        home,
        "note",
        "demo",
        "A tiny model learns to call a calculator. Look at the groups of the first and the last iteration.",
    )


def _agentrl(home: Path, *words: str) -> None:
    here = {"AGENTRL_HOME": str(home), "AGENTRL_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(home.parent)}
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}, **here}
    print("agentrl", *words, flush=True)
    subprocess.run([sys.executable, "-m", "agentrl.cli", *words], env=environment, check=True)


def pack(store: Path, folder: Path, home: Path) -> None:
    """Packs a copy of the store, in which neither the folder nor the name of this machine stands."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "agentrl.db"
        with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(copy)) as made:
            source.backup(made)
            made.execute("PRAGMA journal_mode=DELETE")
            for (table,) in made.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for column in made.execute(f"PRAGMA table_info({table})").fetchall():
                    _rename(made, table, column[1], ((str(home), ELSEWHERE), (socket.gethostname(), "machine")))
            made.commit()
            made.execute("VACUUM")
        with copy.open("rb") as plain, lzma.open(folder / PACKED, "wb", preset=9 | lzma.PRESET_EXTREME) as packed:
            shutil.copyfileobj(plain, packed)


def _rename(made: sqlite3.Connection, table: str, column: str, names: tuple[tuple[str, str], ...]) -> None:
    for before, after in names:
        made.execute(
            f"UPDATE {table} SET {column} = replace({column}, :before, :after) "
            f"WHERE typeof({column}) = 'text' AND instr({column}, :before) > 0",
            {"before": before, "after": after},
        )


if __name__ == "__main__":
    main()
