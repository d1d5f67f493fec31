"""The program that kills samplers counts the tokens of an engine, and what is sampled again after a kill."""

import os
import time
from functools import partial
from pathlib import Path

import pytest

from agentrl.workflow.config import build
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import PolicyRef
from bench.faults import calculator_run, killed_sampler, sampled_log
from bench.faults.experiment import forked
from bench.faults.killed_sampler import Played, costs, moments, strike
from bench.faults.sampled_log import SampledLog, read_iterations
from tests.support.small_models import tiny_random

STEPS, TOKENS = 20, 5
"""Decoding steps of each iteration of the sampler that is killed here, and the tokens of each."""


def test_logged_engine_counts_every_sampled_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sampled_log.FILE, str(tmp_path / "log"))
    folder = tiny_random(tmp_path / "model")
    policy = Policy.load(build({"model.lora_r": 0}).model, str(folder), "cpu")
    base = PolicyRef(str(folder), policy.base_hash)
    engine = sampled_log.start(policy, Settings(home=tmp_path, slots=2))
    futures = [engine.submit(GenerateRequest((5, 6), base, key, 0, limit)) for key, limit in enumerate((3, 7, 9))]
    sampled = sum(len(future.result(60).token_ids) for future in futures)
    engine.close()
    sampled_log.LogUpdates().on_update_end("run", 1, {})
    iterations = read_iterations(tmp_path / "log")
    assert [iteration.tokens for iteration in iterations] == [sampled, 0]
    assert sampled > 3


def test_kill_costs_what_was_sampled_since_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that keeps nothing of an iteration, as one with a checkpoint per update."""
    monkeypatch.setattr(calculator_run, "UPDATES", 2)
    monkeypatch.setattr(killed_sampler, "KILLS", ((1, 0.5),))
    calm = _played(tmp_path / "calm", [])
    assert (calm.kills, calm.restarts) == ((), 0)
    killed = _played(tmp_path / "killed", moments(calm))
    [cost] = costs("side", calm, killed)
    assert killed.restarts == 1
    assert cost.lost_tokens == round(cost.share * STEPS * TOKENS)
    assert 0.5 <= cost.share < 1
    assert cost.lost_share == 1
    assert cost.seconds_to_token > 0


def _played(log: Path, kills: list[tuple[int, int]]) -> Played:
    pids: list[int] = []

    def keep() -> None:
        if not pids or os.waitpid(pids[-1], os.WNOHANG)[0]:
            pids.append(forked(partial(_sample, log), log.with_suffix(".out")))

    at = strike(log, kills, lambda: pids[-1], keep)
    os.waitpid(pids[-1], 0)
    return Played(tuple(read_iterations(log)[:2]), at, (), len(pids) - 1)


def _sample(log: Path) -> None:
    writer = SampledLog(log)
    for _ in range(len(read_iterations(log)) - 1, 2):
        for _ in range(STEPS):
            time.sleep(0.005)
            writer.add_tokens(TOKENS)
        writer.add_update()
