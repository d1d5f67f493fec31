"""A fault at every point whose name begins with a letter from f to z, in a run with the built-in loop."""

from pathlib import Path

import pytest

from tests.support.fault_loop import recovered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module"), pytest.mark.timeout(1200)]

MUST_BE_MET = {
    "submit.after",
    "send_chord.after",
    "generate.sent",
    "send_call.before",
    "start_once.after",
    "run_tool.after",
    "record_result.after",
    "wake.before",
    "finish_episodes.after",
    "send_train.before",
    "rollout.end",
    "sampled_on.end",
    "update.after",
    "rivals.removed",
    "optimizer.dropped",
    "train.end",
    "send_rollouts.after",
}
"""Some of those that must have been met: the loop would be glad to test nothing."""


def test_faults_at_points_f_to_z_change_nothing(tmp_path: Path) -> None:
    assert recovered(tmp_path, "--world", "world", "--point", "[f-z]*") >= {("world", point) for point in MUST_BE_MET}
