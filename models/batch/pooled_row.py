"""A row's vector in the making: the sum of the hidden states that it is the mean of. Knows no tensor library."""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.plan import Pooling

Floats = NDArray[np.float32]


class PooledRow:
    """What is known of a row's vector so far.

    States are added one after the other in the order of positions, in float32: so the vector's bits don't depend on how
    the row was cut into chunks.
    """

    __slots__ = ("_positions", "total")

    def __init__(self, pooling: Pooling, num_tokens: int, hidden_size: int) -> None:
        self._positions = pooling.positions(num_tokens)
        self.total: Floats = np.zeros(hidden_size, dtype=np.float32)
        """(hidden,): the sum so far."""

    def counted(self, start: int, end: int) -> range:
        """The positions of a chunk whose states are to be added; perhaps none."""
        start, end = max(start, self._positions.start), min(end, self._positions.stop)
        return range(start, max(start, end))

    def add_states(self, states: Floats) -> None:
        """Adds the states, (N, hidden), of positions that are ``counted``."""
        for state in states:
            self.total += state

    def vector(self) -> bytes:
        """The mean, once all are added."""
        return (self.total / np.float32(len(self._positions))).tobytes()
