"""`python -m tests.bench.guarded COMMAND...`: run a command, and leave no descendant of it behind.

Peers start servers that detach themselves (Ray, HAProxy, Redis); whatever way the command ends, they end with it.
"""

from __future__ import annotations

import sys

from infra.lifecycle import guard

if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
