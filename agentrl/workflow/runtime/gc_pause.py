"""A pause of garbage collection while torch and transformers are imported: 800,000 objects, none of which is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc() -> Iterator[None]:
    """Turns collection off inside, for imports and the loading of a model: it would scan all objects again and again.

    That took two of the six seconds in which a process loads a model.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
