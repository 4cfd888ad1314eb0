"""The error of quantising weights at load, for a backend's log."""

from dataclasses import dataclass


@dataclass
class QuantizationError:
    """The error of quantising at load, over all matrices."""

    squared_error: float = 0.0
    squared_weights: float = 0.0

    @property
    def relative(self) -> float:
        """The root mean squared error divided by the root mean squared weight."""
        return (self.squared_error / self.squared_weights) ** 0.5 if self.squared_weights else 0.0
