"""Memory that is handed over to other processes. CUDA's allocator is the edge: no GPU is needed."""

import os
import subprocess
import sys

import pytest
import torch

from agentrl.workflow.models.memory import free_cached_blocks, return_freed_memory


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each call of torch's `empty_cache`."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    return calls


def test_free_cached_blocks_empties_the_cache_of_a_gpu_alone(emptied: list[str]) -> None:
    free_cached_blocks(torch.device("cpu"))
    assert emptied == []
    free_cached_blocks(torch.device("cuda", 0))
    assert emptied == ["emptied"]


@pytest.mark.parametrize("lean", [False, True])
def test_return_freed_memory_empties_cache_after_error_too(emptied: list[str], lean: bool) -> None:
    def run_out() -> None:
        with return_freed_memory(torch.device("cuda"), lean):
            assert emptied == []
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_out()
    assert emptied == ["emptied"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_worker_lets_segments_grow_before_torch_is_imported(given: dict[str, str], expected: dict[str, str]) -> None:
    code = (
        "import os, sys; from agentrl.workers.stack import worker; worker._let_segments_grow(); "
        "print('torch' in sys.modules, {k: v for k, v in os.environ.items() if 'ALLOC_CONF' in k})"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"False {expected}"
