"""Garbage collection while torch and transformers are imported: 800,000 objects, none of which is ever garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc() -> Iterator[None]:
    """No collection inside, for imports and the loading of a model: it would look at all there is, again and again.

    That took a third of the six seconds after which a process has a model.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
