"""The format of a run: a number that identifies the rules of sampling, scoring, training and verification.

A change of these rules increases the number, in a migration that pauses the running runs. A run with another number can still
be read, but it cannot be resumed, forked, rescored or verified. The code of its rules no longer exists, and with the new rules
its results would mix two experiments.
"""

from functools import cache
from logging import getLogger

from agentrl.workflow.errors import StateError

log = getLogger("agentrl.store")

RUN_FORMAT = 6
"""The format number of new runs. docs/stability.md says what each format changed."""
LAST_COMMITS = {1: "1db31d1", 2: "1db31d1", 3: "e1be674", 4: "2287f9b", 5: "d799b05"}
"""The last commit of agentrl that supports each older format, by the format's number."""


@cache
def supports_format(run: str, number: int) -> bool:
    """Return whether this agentrl can work on a run of this format. If not, log a warning, once per run and process.

    So a worker that was started before an upgrade, or with another version, leaves the run to the others.
    """
    if number != RUN_FORMAT:
        message = (
            "run %r has format %s, and this worker only works on format %s: restart it with the agentrl that submitted the run"
        )
        log.warning(message, run, number, RUN_FORMAT)
    return number == RUN_FORMAT


def check_format(run: str, number: int, verb: str) -> None:
    """Check that this agentrl supports the run's format. `number` is the number of the run's format. `verb` says what the
    caller wants to do with the run, for the error message. Raise StateError if the run has another format. The message names
    the commit of agentrl that supports the run's format.
    """
    if number == RUN_FORMAT:
        return
    commit = LAST_COMMITS.get(number)
    last = f"commit {commit}, on a copy of the store from before its upgrade" if commit else "the version that made it"
    raise StateError(
        f"Run {run!r} has format {number}. This agentrl can {verb} only runs of format {RUN_FORMAT}. Use agentrl at {last}.",
        f"To read the run with this agentrl: agentrl episodes {run}",
    )
