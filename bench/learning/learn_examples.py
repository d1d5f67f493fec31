"""`python -m bench.learning.learn_examples`: what does each example learn (`make learn-examples`)?

Each example is run by the command of its page, in its folder, on an embedded stack of its own. Its result is a JSON file in
`docs/results/examples/`, with a picture of its curve beside it. An example whose result is there is not run again: remove the
file first. At the end the pictures and the curves' section of `examples/README.md` are made of all results that are there.

`make learn-examples only=own_env,notebook` chooses; `only=` that is no example runs nothing.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import text

from bench.learning import learn_real
from tests.support.real_stack import Stack

EXAMPLES, BUILD, FOLDER = Path("examples"), Path("build/learn-examples"), Path("docs/results/examples")
WARM_START = ("sft", "--dataset", "arithmetic", "--model", "tiny")
"""What the pages of the examples type first; it makes tiny-arithmetic."""
COMMANDS = {
    "openai_agent": (
        "agentrl submit --dataset arithmetic --model tiny --agent agent:solve --max-new-tokens 32 --learning-rate 4e-4"
        " --eval-every 10 --wait"
    ),
    "calc_agent": "python calc_agent.py",
    "train_math_agent": "python train_math_agent.py",
    "openai_agents_sdk": "python openai_agents_sdk.py",
    "own_env": "python own_env.py",
    "notebook": "python ten_lines.py",
}
"""The command with which each example trains, as its page has it."""
NOTEBOOK = "ten_lines.ipynb"


def main() -> int:
    """Run the examples that have no result, then make pictures and page; return the exit code."""
    for name in _arguments().only:
        file = FOLDER / f"{name}.json"
        if not file.exists():
            result = play(name, BUILD / name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def play(name: str, folder: Path) -> dict[str, Any]:
    """Train one example; return its result."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(EXAMPLES / name, folder / "example")
    if NOTEBOOK.startswith(COMMANDS[name].split()[-1].removesuffix(".py")):
        _write_cells(folder / "example")
    with closing(Stack((folder / "home").resolve(), AGENTRL_LEASE_SECONDS="60", AGENTRL_THREADS="0")) as stack:
        shutil.copytree(_warm_start(), stack.home / "models")
        with learn_real.processor_time(stack, folder):
            _run(stack, folder / "example", COMMANDS[name])
        return {
            "cell": name,
            "seed": 0,
            "typed": COMMANDS[name],
            **_curve(stack),
            "processor_seconds": json.loads((folder / "processor.json").read_text()),
            **learn_real.provenance(),
        }


def _run(stack: Stack, folder: Path, command: str) -> None:
    environment = {
        **stack.environment,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
    }
    subprocess.run(shlex.split(command), cwd=folder, env=environment, check=True)


def _curve(stack: Stack) -> dict[str, Any]:
    """The model, the mean reward and the seconds of each iteration, and what was measured on held-out tasks."""
    iterations = "SELECT mean_reward, seconds FROM v_iterations WHERE status = 'done' AND run = :run ORDER BY iteration"
    evals = (
        "SELECT policy_version AS iteration, episodes AS n, mean_reward AS mean, low, high FROM v_evals"
        " WHERE measures = :run ORDER BY policy_version"
    )
    with stack.database.read() as tx:
        run, model = tx.execute(text("SELECT name, model FROM v_runs WHERE kind = 'train'")).one()
        rows = tx.execute(text(iterations), {"run": run}).all()
        held_out = [dict(row) for row in tx.execute(text(evals), {"run": run}).mappings()]
    return {
        "model": Path(model).name,
        "iterations": len(rows),
        "rewards": [row.mean_reward for row in rows],
        "held_out": {"before": held_out[0], "between": held_out[1:-1], "after": held_out[-1]} if held_out else None,
        "seconds": sum(row.seconds for row in rows),
    }


def _warm_start() -> Path:
    """The models' folder with tiny-arithmetic, which the first call makes."""
    home = (BUILD / "warm-start").resolve()
    if not (home / "models" / "tiny-arithmetic" / "config.json").exists():
        environment = {**os.environ, "AGENTRL_HOME": str(home)}
        subprocess.run([sys.executable, "-m", "agentrl.cli", *WARM_START], env=environment, check=True)
    return home / "models"


def _write_cells(folder: Path) -> None:
    """Write the code cells of the notebook as a program."""
    cells = json.loads((folder / NOTEBOOK).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (folder / NOTEBOOK).with_suffix(".py").write_text("\n\n".join(code))


def _names(word: str) -> list[str]:
    unknown = set(word.split(",")) - COMMANDS.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"no example {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    return word.split(",")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=_names, default=list(COMMANDS), help="these examples, with commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
