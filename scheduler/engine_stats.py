"""What an engine tells of itself."""

from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.scheduler.request import SpeculationCounts


class EngineState(Enum):
    """What the engine does with requests."""

    STARTING = auto()
    SERVING = auto()
    RECOVERING = auto()
    """The worker is being replaced; what was admitted goes on afterwards, and nothing new is taken."""
    DRAINING = auto()
    """Finishes what it has; takes nothing new."""
    FAILED = auto()
    """No worker can be had, or our own bookkeeping failed; the requests have ended."""
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands; counts of tokens and steps are totals since the start."""

    state: EngineState
    requests: int
    """Not finished."""
    running: int
    """Rows that run; a request of n choices has up to n."""
    waiting: int
    """Choices that wait for a row."""
    kv_usage: float
    """The share of blocks that rows hold, 0 to 1; cache that can be evicted is not use."""
    cached_blocks: int
    """Blocks that no row holds and that a prefix may still find."""
    steps: int
    prefill_tokens: int
    cached_tokens: int
    decode_rows: int
    output_tokens: int
    preemptions: int
    finished: int
    stalled: int = 0
    """Requests that are held back, because nobody reads their output."""
    retained_blocks: int = 0
    """Those of the cached blocks that are kept for who continues a request."""
    host_blocks: int = 0
    """Evicted blocks that host memory holds, whether the device has them again or not."""
    restored_tokens: int = 0
    """Those of the cached tokens whose KV was copied back from host memory."""
    refused: int = 0
    """Requests that were not admitted."""
    restarts: int = 0
    """Workers that were replaced."""
    step_s: float = 0.0
    """How long a step took, at the median of the last ones."""
    predicted_ttft_s: float | None = None
    """Of a short request that came now; None while nothing is known."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    """Its steps are those of each row."""
