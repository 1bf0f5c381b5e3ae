"""The optimiser of rows that are elsewhere: it gives the change of a row, and keeps one number for each.

Row-wise Adam: the mean square of a row's gradient is averaged over the steps that touch it, with Adam's correction for
the first ones, and the step is the gradient over its root (Adam, Kingma and Ba 2015, with one second moment per row as
in row-wise Adagrad, Naumov et al. 2019, arXiv 1906.00091, and without a first moment). 8 bytes per row: Adam itself
would keep two more rows for each. Decay is decoupled, as in AdamW, and only of rows that are touched.
Refuses nothing. Invariant: a row without gradient is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_KEEP = 0.99
_EPSILON = 1e-8


class RowwiseAdam:
    """For tables of so many rows each."""

    def __init__(self, n_rows: Mapping[str, int], *, weight_decay: float) -> None:
        self._weight_decay = weight_decay
        self._square = {table: np.zeros(n, np.float32) for table, n in n_rows.items()}
        self._touched = {table: np.zeros(n, np.int32) for table, n in n_rows.items()}

    def change(self, table: str, numbers: I64, rows: F32, gradients: F32, rate: float) -> tuple[I64, F32]:
        """Positions i64[m] of the rows that change, and what is added to them f32[m, dim].

        `numbers` i64[n] are distinct; `rows` and `gradients` f32[n, dim] are theirs.
        """
        square = np.einsum("nd,nd->n", gradients, gradients) / gradients.shape[1]
        at = np.flatnonzero(square)
        mine = numbers[at]
        self._touched[table][mine] += 1
        kept = self._square[table]
        kept[mine] += np.float32(1 - _KEEP) * (square[at] - kept[mine])
        whole = kept[mine] / (1 - _KEEP ** self._touched[table][mine].astype(np.float64))
        step = gradients[at] / (np.sqrt(whole)[:, None] + _EPSILON) + self._weight_decay * rows[at]
        return at, (-rate * step).astype(np.float32)

    def state_bytes(self) -> int:
        """Bytes of optimiser state."""
        return sum(a.nbytes for arrays in (self._square, self._touched) for a in arrays.values())
