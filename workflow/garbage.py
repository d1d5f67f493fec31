"""Garbage collection in a process of ours that loads torch: its modules are 800,000 objects, and none of them is ever garbage.

As Python sets it, the collector looks at them again and again while they are imported, and once more when the process ends: of
six seconds that such a process takes without doing anything it took two.
"""

import atexit
import gc

_USUAL = gc.get_threshold()
SELDOM = 50_000
"""Objects made and not yet freed that let the collector look; Python's own number is 700."""


def collect_seldom() -> None:
    """For a process that has just begun, until `collect_as_usual`; when it ends nothing that is there is looked at again."""
    gc.set_threshold(SELDOM, 10, 10)
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """All is imported, and work begins: a cycle may hold tensors, whose memory is wanted soon."""
    gc.set_threshold(*_USUAL)
