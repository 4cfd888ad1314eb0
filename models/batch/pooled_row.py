"""The vector of a pooled row: the running sum of the hidden states whose mean it is. Uses no tensor library."""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.plan import Pooling

Floats = NDArray[np.float32]


class PooledRow:
    """The running sum of a row's vector. States are added one by one in the order of positions, in float32, so the
    result is bit-identical however the row was cut into chunks."""

    __slots__ = ("_positions", "total")

    def __init__(self, pooling: Pooling, num_tokens: int, hidden_size: int) -> None:
        self._positions = pooling.positions(num_tokens)
        self.total: Floats = np.zeros(hidden_size, dtype=np.float32)
        """(hidden,): the sum so far."""

    def counted(self, start: int, end: int) -> range:
        """Returns the positions of a chunk whose states count towards the vector; possibly none."""
        start, end = max(start, self._positions.start), min(end, self._positions.stop)
        return range(start, max(start, end))

    def add_states(self, states: Floats) -> None:
        """Adds the states, (N, hidden), of positions that ``counted`` returned."""
        for state in states:
            self.total += state

    def vector(self) -> bytes:
        """Returns the mean as float32 bytes, once all states are added."""
        return (self.total / np.float32(len(self._positions))).tobytes()
