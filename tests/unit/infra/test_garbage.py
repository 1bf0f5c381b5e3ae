from __future__ import annotations

import subprocess
import sys

_SETTLED = """
import gc, weakref
from infra.garbage import settle
class Node: pass
settle()
print(gc.get_freeze_count() > 1000, gc.isenabled())
node = Node(); node.itself = node; seen = weakref.ref(node); del node
gc.collect()
print(seen() is None)
"""


def test_what_was_loaded_is_looked_at_no_more_and_later_cycles_still_are() -> None:
    said = subprocess.run([sys.executable, "-c", _SETTLED], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["True", "True", "True"]
