"""On a processor with AVX2 and nothing newer everything goes on: sampling and training in each precision, and doctor says why.

oneDNN and torch are told to do without what this processor has beyond it; elsewhere than on x86 they compute as they are.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sampler_roads import older_processor
from tests.support.small_models import tiny_random

X86 = platform.machine() in ("x86_64", "AMD64")
NEEDS = "avx512bw"
"""What oneDNN says that it wants for bfloat16."""

SAMPLES = """
import sys, torch
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.models.packed_weights import why_not_packed
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.trajectory import PolicyRef

for options in ({"dtype": "bfloat16"}, {"sampler_dtype": "bfloat16"}, {"dtype": "float16"}):
    policy = Policy.load(ModelConfig(**options), sys.argv[1], "cpu")
    request = GenerateRequest((5, 6, 7), PolicyRef(str(policy.folder), policy.base_hash), 3, 0, 24)
    engine = RollingEngine(policy, slots=2)
    completion = engine.submit(request).result(60)
    engine.close()
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad(), policy.training() as model:
        ours, _ = token_logprobs(model.eval(), ids, torch.ones_like(ids))
    assert (ours[0, 2:] - torch.tensor(completion.logprobs)).abs().max() < 0.1
print(why_not_packed(torch.bfloat16))
"""
"""A turn of a small model in each half precision; prints why bfloat16 is not packed."""


@pytest.mark.slow
def test_older_processor_samples_in_bfloat16(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAMPLES, str(tiny_random(tmp_path / "base"))]
    done = subprocess.run(command, env=older_processor(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert NEEDS in done.stdout or not X86


def test_older_processor_doctor_explains_packing_by_precision(tmp_path: Path) -> None:
    environment = older_processor(AGENTRL_HOME=str(tmp_path))
    command = [sys.executable, "-m", "agentrl.cli.probe", "torch", "auto"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    facts = json.loads(done.stdout)
    if X86:
        assert facts["cpu"].endswith("AVX2")
        assert facts["lacking"]["float32"] == ""
        assert NEEDS in facts["lacking"]["bfloat16"]


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_older_processor_passes_tests_that_depend_on_it() -> None:
    chosen = [
        "tests/models/test_packed_weights.py",
        "tests/models/test_fast_forward.py",
        "tests/models/test_policy.py",
        "tests/models/test_logprobs.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", *chosen]
    done = subprocess.run(command, env=older_processor(), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
