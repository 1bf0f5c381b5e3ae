"""What the fused rankers share: sizes of a program's part, and how many programs there are. Pure."""

from __future__ import annotations

# Streaming multiprocessors of the GPUs that matter here: 40 (T4) to 132 (H200).
_PROCESSORS = 132
_FEW, _MANY = 16, 64
# Numbers of a token or a user.
WIDEST = 128


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds it and is not below `least`; a product of matrices takes no fewer than 16."""
    return max(least, 1 << (size - 1).bit_length())


def power_of_two(width: int) -> bool:
    """Whether a layer's width needs no padding, and fits."""
    return 16 <= width <= 512 and width & (width - 1) == 0


def block_of(batch: int, candidates: int) -> tuple[int, int]:
    """Candidates of one program and its warps: few candidates where all of them would not keep the GPU busy."""
    few = batch * candidates <= _FEW * _PROCESSORS
    return (_FEW if few else _MANY), 4
