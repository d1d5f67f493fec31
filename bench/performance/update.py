"""One update, 64 sequences of 256 + 256 tokens on the bench model: seconds and peak memory, ours and TRL's.

TRL is swept over its microbatch and gradient checkpointing, one run each. Then its fastest, and the leanest of those that come
within a tenth of that, are measured in turns with ours, always in fresh processes. Ours runs as it comes. Both sides are held
to the same tokens, entropy and gradient norm. `BENCH=quick` sweeps only two microbatches, without checkpointing.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.performance.cases import Cases
from bench.performance.models import saved
from bench.performance.processes import Ran, Side, in_turns, run
from bench.performance.report import Comparison, Measured, Table, load

RANKS = {"LoRA r=8": 8, "full": 0}
SWEEP = [(microbatch, checkpointing) for microbatch in (1, 2, 4, 8, 16) for checkpointing in (False, True)]
QUICK = [(1, False), (4, False)]
AS_FAST = 1.1
ROUNDS = 3
COLUMNS = ("", "seconds", "peak MiB", "before MiB", "tokens", "loss", "gradient norm", "entropy")


def measure() -> Measured:
    """The sweep and the rounds, for LoRA and for all weights."""
    rows: list[list[object]] = []
    comparisons: list[Comparison] = []
    cases = Cases()
    with tempfile.TemporaryDirectory() as folder:
        path = str(saved("bench", Path(folder)))
        for kind, rank in RANKS.items():
            with cases.case(f"update bench, {kind}"):
                swept = _sweep(path, rank)
                rows += [_row(f"{kind}, {name}, swept", ran) for name, ran in swept.items()]
                fastest, leanest = _best(swept)
                sides = {name: _trl(path, rank, name) for name in (fastest, leanest)}
                rounds = in_turns({"agentrl": _ours(path, rank), **sides}, ROUNDS)
                rows += [_row(f"{kind}, {name}", ran) for name, runs in rounds.items() for ran in runs]
                _same_work(rounds)
                comparisons += _compared(kind, rounds, fastest, leanest)
    return Measured([Table("one update, every run", COLUMNS, [*rows, *cases.rows()], load())], comparisons, cases.unmeasured)


def _ours(path: str, rank: int) -> Side:
    return Side("bench.performance.update_ours", "prepare", {"path": path, "rank": rank, "options": {}})


def _trl(path: str, rank: int, name: str) -> Side:
    microbatch, checkpointing = next(setting for setting in SWEEP if _name(*setting) == name)
    arguments = {"path": path, "rank": rank, "microbatch": microbatch, "checkpointing": checkpointing}
    return Side("bench.performance.update_trl", "prepare", arguments)


def _name(microbatch: int, checkpointing: bool) -> str:
    return f"TRL, microbatch {microbatch}{', checkpointing' if checkpointing else ''}"


def _sweep(path: str, rank: int) -> dict[str, Ran]:
    found = {}
    for setting in QUICK if os.environ.get("BENCH") == "quick" else SWEEP:
        name = _name(*setting)
        found[name] = run(_trl(path, rank, name))
        print(rank, name, f"{found[name].value['seconds']:.1f} s, {_peak(found[name]):.0f} MiB", flush=True)
    return found


def _best(swept: Mapping[str, Ran]) -> tuple[str, str]:
    """The fastest, and the one of the smallest peak among those that are nearly as fast."""
    fastest = min(swept, key=lambda name: swept[name].value["seconds"])
    limit = AS_FAST * swept[fastest].value["seconds"]
    fast = [name for name in swept if swept[name].value["seconds"] <= limit]
    return fastest, min(fast, key=lambda name: _peak(swept[name]))


def _peak(ran: Ran) -> float:
    """On a GPU what torch allocated there, else what was resident."""
    return ran.gpu_mib or ran.peak_mib


def _same_work(rounds: Mapping[str, Sequence[Ran]]) -> None:
    """Neither side may save time by doing something else. LoRA begins with another random matrix on each side."""
    ours, *others = (runs[0].value for runs in rounds.values())
    for other in others:
        for name, tolerance in (("tokens", 0.0), ("entropy", 0.01), ("grad_norm", 0.1)):
            if not math.isclose(ours[name], other[name], rel_tol=tolerance):
                raise RuntimeError(f"The sides do different work: {name} is {ours[name]} and {other[name]}.")


def _compared(kind: str, rounds: Mapping[str, Sequence[Ran]], fastest: str, leanest: str) -> list[Comparison]:
    seconds = {name: [ran.value["seconds"] for ran in runs] for name, runs in rounds.items()}
    peaks = {name: [_peak(ran) for ran in runs] for name, runs in rounds.items()}
    memory = "GPU memory" if torch.cuda.is_available() else "resident memory"
    return [
        Comparison(f"update bench, {kind}", seconds["agentrl"], seconds[fastest], "s", f"its fastest: {fastest}", "less"),
        Comparison(
            f"update bench, {kind}, peak {memory}", peaks["agentrl"], peaks[leanest], "MiB", f"its leanest: {leanest}", "less"
        ),
    ]


def _row(name: str, ran: Ran) -> list[object]:
    value = ran.value
    return [
        name,
        value["seconds"],
        _peak(ran),
        ran.before_mib,
        *(value[key] for key in ("tokens", "loss", "grad_norm", "entropy")),
    ]
