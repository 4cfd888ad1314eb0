"""The state and statistics of an engine."""

from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.kv.manager import KVCacheManager
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


@dataclass
class Counters:
    """Totals since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    """Positions computed in chunks, including those of preempted rows."""
    cached_tokens: int = 0
    """Positions that the prefix cache saved."""
    decode_rows: int = 0
    """Decoding rows, summed over all steps."""
    preemptions: int = 0
    resumed_requests: int = 0
    """Requests that continued the token ids of another service."""
    rows_sat_out: int = 0
    """Rows that a step left out because their tenant had its share of it, summed over all steps."""
    output_tokens: int = 0
    """Tokens chosen, including those that are never shown."""
    state_hits: int = 0
    """Rows that began with a saved recurrent state."""
    state_misses: int = 0
    """Rows for which more KV was cached than there was a saved state for."""
    state_missed_tokens: int = 0
    """Positions whose KV was cached, and that these rows computed again."""
    refused: int = 0
    """Requests that were not admitted."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    """Counts of drafts. Its ``steps`` counts each row's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy the engine is now. The fields are those of ``EngineStats``."""

    state: EngineState
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    predicted_ttft_s: float | None = None


@dataclass(kw_only=True)
class EngineStats(Counters):
    """A snapshot of the engine: its totals, and its current values."""

    state: EngineState
    finished: int
    """The total of requests that have finished."""
    restarts: int
    """The total of workers that were replaced."""
    requests: int = 0
    """Unfinished requests. Neither this nor the totals of requests include warm-ups."""
    running: int = 0
    """Running rows, including those of warm-ups. A request of n sequences has up to n."""
    waiting: int = 0
    """Sequences that wait for a row, except warm-ups."""
    waiting_tokens: int = 0
    """Tokens of waiting sequences that are neither cached nor computed for an earlier sequence."""
    prefill_tokens_left: int = 0
    """The same, plus the tokens of running rows that must be computed before they can decode."""
    kv_usage: float = 0.0
    """The share of blocks that rows hold, 0 to 1. Cached blocks that can be evicted do not count."""
    cached_blocks: int = 0
    """Blocks that no row holds and that a prefix can still find."""
    stalled: int = 0
    """Requests that are held back because their output is not read."""
    retained_blocks: int = 0
    """The part of the cached blocks that is kept for continuations of a request."""
    host_blocks: int = 0
    """Evicted blocks in host memory, whether or not the device has them again."""
    restored_tokens: int = 0
    """The part of the cached tokens whose KV was copied back from host memory, since the start."""
    state_slots_used: int = 0
    """Slots of recurrent states that hold one, or will."""
    state_snapshots: int = 0
    """The part of these slots that is not a running row's current state."""
    step_s: float = 0.0
    """The median time of the last steps."""
    predicted_ttft_s: float | None = None
    """The predicted time to the first token of a short request that arrives now; None while nothing is known."""

    def read_cache(self, kv: KVCacheManager) -> None:
        """Sets what the KV cache holds."""
        self.cached_blocks = kv.pool.num_cached
        self.retained_blocks = kv.pool.num_retained
        self.host_blocks = len(kv.host)
        self.restored_tokens = kv.num_restored_tokens
        self.state_slots_used = kv.states.num_used
        self.state_snapshots = kv.states.num_snapshots
