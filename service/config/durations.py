"""Converts between seconds and google.protobuf.Duration."""

from google.protobuf import duration
from google.protobuf.duration_pb2 import Duration

MAX_SECONDS = 315_576_000_000
"""Limit of a Duration: 10,000 years."""


def to_duration(seconds: float) -> Duration:
    """Returns a Duration to the microsecond, at least 0 and at most ``MAX_SECONDS``."""
    return duration.from_microseconds(round(min(max(0.0, seconds), MAX_SECONDS) * 1e6))


def to_seconds(value: Duration) -> float:
    """Returns the seconds of a valid Duration."""
    return value.ToNanoseconds() / 1e9


def is_valid(value: Duration) -> bool:
    """Returns whether both parts are in their ranges and have the same sign."""
    return (
        abs(value.seconds) <= MAX_SECONDS and abs(value.nanos) < 1_000_000_000 and not value.seconds * value.nanos < 0
    )
