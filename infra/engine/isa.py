"""Which instructions the CPU of this machine has: compiled code runs where they are the same, and crashes elsewhere.

Read from the kernel, without torch. Invariant: two machines have the same name only if neither has a vector instruction
set the other lacks.
"""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path

# What a compiler may use when it is told to build for the machine it runs on; the rest of the flags are of no concern.
_USED = re.compile(
    r"^(sse|ssse|avx|amx|fma|f16c|bmi|gfni|vaes|vpclmul|pclmul|sha|popcnt|movbe|abm|adx|aes|rd|clw|clf|"
    r"asimd|fp|sve|sme|neon|i8mm|bf16|atomics|lse|dcpop|jscvt|fcma|lrcpc)"
)
_LEVELS = (("avx512f", "avx512"), ("avx2", "avx2"), ("sve", "sve"), ("asimd", "neon"))


def cpu_isa(cpuinfo: str | None = None) -> str:
    """For example "avx512-5d41c0f2": the widest vectors, and a digest of all instruction sets of this machine.

    `cpuinfo` is the text of /proc/cpuinfo, read when it is not given; where there is none, the name of the processor
    stands for what it can do.
    """
    if cpuinfo is None:
        file = Path("/proc/cpuinfo")
        cpuinfo = file.read_text() if file.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = sorted({flag for flag in found.group(1).split() if _USED.match(flag)}) if found else []
    level = next((name for flag, name in _LEVELS if flag in flags), "plain")
    whole = " ".join([platform.machine(), *(flags or [platform.processor()])])
    return f"{level}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
