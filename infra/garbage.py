"""Python's cyclic garbage collector, set for processes that answer requests."""

from __future__ import annotations

import gc

# Requests make few cycles; looking for them every 700 new objects, as is the default, costs more than it finds.
_YOUNG_OBJECTS = 20_000


def settle() -> None:
    """Once everything is loaded: what is there now stays, and is not looked at again; look at the rest more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
