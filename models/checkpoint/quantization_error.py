"""What quantising weights at load costs, as a backend's log tells it."""

from dataclasses import dataclass


@dataclass
class QuantizationError:
    """What quantising at load cost, over all matrices."""

    squared_error: float = 0.0
    squared_weights: float = 0.0

    @property
    def relative(self) -> float:
        """The root of the mean squared error, of the root of the mean squared weight."""
        return (self.squared_error / self.squared_weights) ** 0.5 if self.squared_weights else 0.0
