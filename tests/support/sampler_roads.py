"""The roads that a sampler may take on a processor: packed weights where it has the kernels, plain ones where not."""

import os

import pytest

OLDER = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""What makes oneDNN and torch do without whatever a processor of today has beyond AVX2; others know neither name."""


@pytest.fixture(params=["packed", "plain"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """First every product packed that this processor can pack, however small it is; then none, as on one that can pack none."""
    if request.param == "packed":
        monkeypatch.setattr("agentrl.workflow.models.packed_weights.WORTH_PRODUCTS", 0)
    else:
        monkeypatch.setattr("agentrl.workflow.models.packed_weights.why_not_packed", lambda dtype: "told so by a test")
    name: str = request.param
    return name


def older_processor(**environment: str) -> dict[str, str]:
    """The environment of a process that computes as on a processor with AVX2 and nothing newer."""
    return {**os.environ, **OLDER, **environment}
