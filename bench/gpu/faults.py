"""Memory that runs out and a device that is lost: what the sampler and the trainer do then.

Where memory runs out, all turns must still be sampled and the update must have the same gradient, in smaller pieces. After a
device-side assert every turn must end with an error and none may wait for ever; `device_lost` asks the same of the whole stack.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import PolicyRef
from bench.gpu import injected
from bench.gpu.part import Part, Row, describe_error
from bench.performance.memory_ours import GROUP_SIZE, GROUPS, config_of, groups_of
from bench.performance.models import saved

LORA = {"model.load_in_4bit": False, "model.lora_r": 8, "model.dtype": "float32"}
LEAST_SECONDS = 10.0
MAX_ROWS = 4
"""Rows of a pass that fit without a GPU, where the error is raised."""
TURN_SECONDS = 30.0
"""A turn that has not ended after this long waits for ever."""


def measure(part: Part) -> None:
    """Add a row for each fault."""
    with tempfile.TemporaryDirectory() as folder:
        path = saved("bench" if part.gpu else "tiny", Path(folder))
        part.attempt("out of memory while sampling", lambda: _sample_without_memory(part, path), LEAST_SECONDS)
        part.attempt("out of memory while updating", lambda: _update_without_memory(part, path), LEAST_SECONDS)
        part.attempt("device assert while sampling", lambda: _lose_device(part, path), LEAST_SECONDS)


def _sample_without_memory(part: Part, path: Path) -> Row:
    rows, tokens = (256, 256) if part.gpu else (8, 8)
    policy = Policy.load(config_of(LORA).model, str(path))
    engine = RollingEngine(policy, rows)
    with policy.sampling() as model:
        cap = injected.MemoryCap(model, 256 * 2**20, MAX_ROWS)
    began = time.perf_counter()
    try:
        futures = [_submit(engine, policy, number, tokens) for number in range(rows)]
        lengths = [len(future.result(max(1.0, part.left)).token_ids) for future in futures]
    finally:
        cap.end()
        engine.close()
    row: Row = {
        "turns": rows,
        "complete": lengths.count(tokens),
        "ran_out": cap.failures,
        "seconds": time.perf_counter() - began,
    }
    return row | _expect(row["complete"] == rows and cap.failures > 0, "not all turns were sampled, or memory did not run out")


def _submit(engine: RollingEngine, policy: Policy, number: int, tokens: int) -> Future[Completion]:
    policy.chat.end_ids = frozenset({-1})  # no turn ends before its length
    prompt = tuple(range(20, 36))
    return engine.submit(GenerateRequest(prompt, PolicyRef("", policy.base_hash), number + 1, 0, tokens))


def _update_without_memory(part: Part, path: Path) -> Row:
    groups = groups_of([_random_row(number, 256 if part.gpu else 8) for number in range(GROUPS * GROUP_SIZE)])
    expected = _load(path, microbatch_tokens=1024)[1].update(groups, 0).metrics["grad_norm"]
    policy, trainer = _load(path, microbatch_tokens=2**20)
    with policy.training() as model:
        cap = injected.MemoryCap(model, 512 * 2**20, MAX_ROWS)
    began = time.perf_counter()
    try:
        actual = trainer.update(groups, 0).metrics["grad_norm"]
    finally:
        cap.end()
    row: Row = {"grad_norm": actual, "expected": expected, "ran_out": cap.failures, "seconds": time.perf_counter() - began}
    same = abs(actual - expected) <= 1e-3 * expected
    return row | _expect(same and cap.failures > 0, "the gradient is another one, or memory did not run out")


def _load(path: Path, microbatch_tokens: int) -> tuple[Policy, Trainer]:
    config = config_of({**LORA, "update.microbatch_tokens": microbatch_tokens})
    policy = Policy.load(config.model, str(path))
    return policy, Trainer(policy, config)


def _random_row(number: int, tokens: int) -> tuple[list[int], list[float]]:
    return [20 + (7 * number + 3 * place) % 200 for place in range(tokens)], [-5.0] * tokens


def _lose_device(part: Part, path: Path) -> Row:
    """Sample in a process of its own, which is of no use afterwards, and may end with the device."""
    if not part.gpu:
        return lose_device(path)
    command = [sys.executable, "-m", "bench.gpu.faults", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(1.0, part.left))
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"process": f"ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    row: Row = json.loads(lines[-1])
    return row


def lose_device(path: Path) -> Row:
    """Return how turns end during and after a device-side assert."""
    policy = Policy.load(config_of(LORA).model, str(path))
    engine = RollingEngine(policy, 4)
    with policy.sampling() as model:
        injected.lose_device(model, after=3)
    during = [_outcome(future) for future in [_submit(engine, policy, number, 8) for number in range(4)]]
    after = [_outcome(future) for future in [_submit(engine, policy, number, 8) for number in range(4, 6)]]
    row: Row = {"turns": len(during), "during": ", ".join(sorted(set(during))), "after": ", ".join(sorted(set(after)))}
    wrong = {"sampled", "waits for ever"} & {*during, *after}
    return row | _expect(not wrong, "a turn was sampled, or waits, although the device is lost")


def _outcome(future: Future[Completion]) -> str:
    try:
        future.result(TURN_SECONDS)
    except TimeoutError:
        return "waits for ever"
    except Exception as error:  # noqa: BLE001 - it is what is reported
        return describe_error(error)[:120]
    return "sampled"


def _expect(true: bool, problem: str) -> Row:
    return {} if true else {"failed": problem}


if __name__ == "__main__":
    print(json.dumps(lose_device(Path(sys.argv[1]))), flush=True)
    os._exit(0)  # with a lost device an orderly end would be an abort
