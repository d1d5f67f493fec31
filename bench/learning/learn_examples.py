"""`python -m bench.learning.learn_examples`: what does each example learn (`make learn-examples`)?

Each example is run by the command of its page, in its folder, on an embedded stack of its own. Its result is a JSON file in
`docs/results/examples/`. An example whose result is there is not run again: remove the file and `build/learn-examples/` first.
At the end the curves of all results are drawn, and shown in `examples/README.md`.

`make learn-examples only=own_env,notebook` chooses. Not here are examples that do not train (benchmark), and those that need a
pretrained model: the reward of the tiny model stays 0 in train_math_agent, and it writes no SQL and follows no prompt.
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

from bench.learning import learn_real, results
from tests.support.real_stack import Stack

EXAMPLES, BUILD, FOLDER = Path("examples"), Path("build/learn-examples"), Path("docs/results/examples")
PAGE = EXAMPLES / "README.md"
BEGIN, END = "<!-- curves: made by `make learn-examples` -->\n", "<!-- end of curves -->\n"
WARM_START = ("sft", "--dataset", "arithmetic", "--model", "tiny")
"""What the pages of the examples type first; it makes tiny-arithmetic."""
COMMANDS = {
    "openai_agent": (
        "agentrl submit --dataset arithmetic --model tiny --agent agent:solve --max-new-tokens 32 --learning-rate 4e-4"
        " --epochs 1 --eval-every 10 --wait"
    ),
    "calc_agent": "python calc_agent.py",
    "openai_agents_sdk": "python openai_agents_sdk.py",
    "own_env": "python own_env.py",
    "notebook": "python ten_lines.py",
}
"""The command with which each example trains, as its page has it."""
NOTEBOOK = "ten_lines.ipynb"


def main() -> int:
    """Run the examples that have no result, then draw all curves; return the exit code."""
    for name in _arguments().only:
        file = FOLDER / f"{name}.json"
        if not file.exists():
            result = play(name, BUILD / name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result, indent=1) + "\n")
    write_gallery()
    return 0


def write_gallery() -> None:
    """Draw the curve of each result, and show all of them in the page of the examples."""
    found = results.load_results(FOLDER)
    for one in found:
        results.draw([one], FOLDER / f"{one['cell']}.svg", window=1)
    lines = results.table(found, "example")
    for one in found:
        name = one["cell"]
        command = f"all cells of `{NOTEBOOK}`" if name == "notebook" else f"`{one['typed']}`"
        picture = os.path.relpath(FOLDER / f"{name}.svg", PAGE.parent)
        lines += ["", f"**[{name}]({name})**: {command}", "", f"![The reward of each iteration of {name}]({picture})"]
    results.fill(PAGE, BEGIN, lines, END)


def play(name: str, folder: Path) -> dict[str, Any]:
    """Train one example, unless it was trained before; return its result."""
    with closing(Stack((folder / "home").resolve(), AGENTRL_LEASE_SECONDS="60", AGENTRL_THREADS="0")) as stack:
        if not (folder / "provenance.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _train(stack, folder, name)
        return {
            "cell": name,
            "seed": 0,
            "typed": COMMANDS[name],
            **_curve(stack),
            "processor_seconds": json.loads((folder / "processor.json").read_text()),
            **json.loads((folder / "provenance.json").read_text()),
        }


def _train(stack: Stack, folder: Path, name: str) -> None:
    """Run the example's command in a copy of its folder."""
    shutil.copytree(EXAMPLES / name, folder / "example")
    shutil.copytree(_warm_start(), stack.home / "models")
    if (folder / "example" / NOTEBOOK).exists():
        _write_cells(folder / "example")
    provenance = learn_real.provenance()  # before the run: the checkout may change meanwhile
    with learn_real.processor_time(stack, folder):
        _type(stack, folder / "example", COMMANDS[name])
    (folder / "provenance.json").write_text(json.dumps(provenance))


def _type(stack: Stack, folder: Path, command: str) -> None:
    environment = {
        **stack.environment,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
    }
    subprocess.run(shlex.split(command), cwd=folder, env=environment, check=True)


def _curve(stack: Stack) -> dict[str, Any]:
    """The model, the mean reward of each iteration, what was measured on held-out tasks, and the seconds of the run."""
    iterations = "SELECT mean_reward FROM v_iterations WHERE status = 'done' AND run = :run ORDER BY iteration"
    evals = (
        "SELECT policy_version AS iteration, episodes AS n, mean_reward AS mean, low, high FROM v_evals"
        " WHERE measures = :run ORDER BY policy_version"
    )
    with stack.database.read() as tx:
        run, model, seconds = tx.execute(text("SELECT run, model, seconds FROM v_runs WHERE kind = 'train'")).one()
        rewards = [*tx.execute(text(iterations), {"run": run}).scalars()]
        held_out = [dict(row) for row in tx.execute(text(evals), {"run": run}).mappings()]
    return {
        "model": Path(model).name,
        "iterations": len(rewards),
        "rewards": rewards,
        "held_out": {"before": held_out[0], "between": held_out[1:-1], "after": held_out[-1]},
        "seconds": seconds,
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
