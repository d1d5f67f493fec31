"""A fault at every point whose name begins with a letter from a to e, in a run with the built-in loop."""

from pathlib import Path

import pytest

from tests.support.fault_loop import recovered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module"), pytest.mark.timeout(1200)]

MUST_BE_MET = {
    "claim_group.before",
    "commit_sampled.before",
    "call.end",
    "commit_observed.before",
    "commit_asked.before",
    "commit_asked.after",
    "claim_iteration.after",
    "checkpoint.written",
    "checkpoint.sealed",
    "checkpoint.renamed",
    "commit_update.before",
    "commit_update.after",
    "control.before",
}
"""Some of those that must have been met: the loop would be glad to test nothing."""


def test_faults_at_points_a_to_e_change_nothing(tmp_path: Path) -> None:
    assert recovered(tmp_path, "--world", "world", "--point", "[a-e]*") >= {("world", point) for point in MUST_BE_MET}
