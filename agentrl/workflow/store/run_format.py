"""The format of a run: the number of the rules by which it is sampled, scored, trained and verified.

A change of those rules raises the number, in a migration that pauses the runs that are running. A run of another number stays
readable. Nothing goes on from it: the code that knew its rules is gone, and new rules would mix two experiments in one run.
"""

from agentrl.workflow.errors import StateError

RUN_FORMAT = 3
"""The number of new runs. docs/stability.md tells what each raise changed."""
LAST_COMMIT = "1db31d1"
"""The last commit of agentrl that works on the formats before."""


def check_format(run: str, number: int, verb: str) -> None:
    """Refuse to `verb` the run of that name where its format is not this agentrl's.

    Raises:
        StateError: in one sentence that names the commit of agentrl that can.
    """
    if number == RUN_FORMAT:
        return
    raise StateError(
        f"Run {run!r} has format {number} and this agentrl can {verb} only format {RUN_FORMAT}: use agentrl at "
        f"commit {LAST_COMMIT}, on a copy of the store from before its upgrade.",
        f"Read it here: agentrl episodes {run}",
    )
