"""The format of a run: the number of the rules by which it is sampled, scored, trained and verified.

A change of these rules increases the number, in a migration that pauses the running runs. A run with another number stays
readable, but cannot be resumed, forked, rescored or verified: the code of its rules no longer exists, and new rules would mix
two experiments.
"""

from agentrl.workflow.errors import StateError

RUN_FORMAT = 6
"""The format number of new runs. docs/stability.md says what each format changed."""
LAST_COMMITS = {1: "1db31d1", 2: "1db31d1", 3: "e1be674", 4: "2287f9b", 5: "d799b05"}
"""An older format -> the last commit of agentrl that supports it."""


def check_format(run: str, number: int, verb: str) -> None:
    """Check that the run has the format that this agentrl supports.

    Args:
        run: the run's name.
        number: the run's format number.
        verb: what the caller wants to do with the run, for the message.

    Raises:
        StateError: the run has another format. The message names the commit of agentrl that supports it.
    """
    if number == RUN_FORMAT:
        return
    commit = LAST_COMMITS.get(number)
    last = f"commit {commit}, on a copy of the store from before its upgrade" if commit else "the version that made it"
    raise StateError(
        f"Run {run!r} has format {number} and this agentrl can {verb} only format {RUN_FORMAT}: use agentrl at {last}.",
        f"Read it here: agentrl episodes {run}",
    )
