"""Pauses Python's garbage collection while torch and transformers are imported. The import creates 800,000 objects, none of
which is garbage.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc() -> Iterator[None]:
    """Turn garbage collection off in the `with` block, for imports and for the loading of a model.

    Otherwise the collector would scan all objects again and again. These scans took two of the six seconds in which a process
    loads a model.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
