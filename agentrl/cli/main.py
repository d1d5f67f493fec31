"""`agentrl`: runs one command line.

Exit codes: 0 done, 1 failed, 2 invalid input, 3 an object exists and differs, 4 a service is not available, 5 not found,
6 wrong state, 7 access denied, 8 model, 9 checkpoint, 10 no sandbox, 11 workers that lack something that a run needs,
12 a device failed, 13 a rank failed, 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence

STDOUT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        from agentrl.cli.app import run  # takes a third of a second, in which Ctrl-C must work too

        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has closed the pipe; flushing the buffer must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        return 0
