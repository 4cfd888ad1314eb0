"""The state and statistics of an engine."""

from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.scheduler.request import SpeculationCounts


class EngineState(Enum):
    """What the engine does with requests."""

    STARTING = auto()
    SERVING = auto()
    RECOVERING = auto()
    """The worker is being replaced. Admitted requests continue afterwards; new ones are refused."""
    DRAINING = auto()
    """Finishes the admitted requests; new ones are refused."""
    FAILED = auto()
    """No worker can be started, or the scheduler had an internal error. All requests have ended."""
    STOPPED = auto()


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    """Positions computed in chunks, including those of preempted rows."""
    decode_rows: int = 0
    """Decoding rows, summed over all steps."""
    preemptions: int = 0
    rows_sat_out: int = 0
    """Rows that a step left out because their tenant had its share of it, summed over all steps."""
    output_tokens: int = 0
    """Tokens chosen, including those that are never shown."""
    refused: int = 0
    """Requests that were not admitted."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Counts of tokens and steps are totals since the start."""

    state: EngineState
    requests: int
    """Requests that have not finished."""
    running: int
    """Running rows. A request of n sequences has up to n."""
    waiting: int
    """Sequences that wait for a row."""
    kv_usage: float
    """The share of blocks that rows hold, 0 to 1. Cached blocks that can be evicted do not count."""
    cached_blocks: int
    """Blocks that no row holds and that a prefix can still find."""
    steps: int
    prefill_tokens: int
    cached_tokens: int
    decode_rows: int
    output_tokens: int
    preemptions: int
    finished: int
    stalled: int = 0
    """Requests that are held back because their output is not read."""
    retained_blocks: int = 0
    """The part of the cached blocks that is kept for continuations of a request."""
    host_blocks: int = 0
    """Evicted blocks in host memory, whether or not the device has them again."""
    restored_tokens: int = 0
    """The part of the cached tokens whose KV was copied back from host memory."""
    refused: int = 0
    """Requests that were not admitted."""
    restarts: int = 0
    """Workers that were replaced."""
    step_s: float = 0.0
    """The median time of the last steps."""
    predicted_ttft_s: float | None = None
    """The predicted time to the first token of a short request that arrives now; None while nothing is known."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    """Counts of drafts. ``steps`` counts each row's steps."""
