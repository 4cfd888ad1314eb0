"""The entries of a request's timeline: what happened to it, and why, as data."""

from dataclasses import dataclass
from enum import Enum, auto

from penstock.scheduler.request import EngineFinishReason


class EntryKind(Enum):
    """The kind of an entry."""

    ACCEPTED = auto()
    WAITED = auto()
    BEGAN = auto()
    PREFILLED = auto()
    DECODED = auto()
    PREEMPTED = auto()
    RESTARTED = auto()
    HELD = auto()
    UPDATED = auto()
    INJECTED = auto()
    ENDED = auto()


class WaitCause(Enum):
    """What a sequence waits for. ``Timeline.waits`` gets the numbers that belong to it."""

    TURN = auto()
    """Its turn. The number of requests ahead of it."""
    NEXT_STEP = auto()
    ROWS = auto()
    """A row. The number of rows that may run, all of which do."""
    BLOCKS = auto()
    """Free blocks. How many there are, and how many it needs."""
    STATES = auto()
    """A slot for its recurrent state. The number of slots, all of which are used."""
    BUDGET = auto()
    """Tokens of a step, which go to others. The number of tokens in a step."""
    PREFIX = auto()
    """Its prefix, which another request computes."""
    LAST_RESULT = auto()
    """The result of its last step."""
    WORKER = auto()
    """The new worker."""
    ADAPTER = auto()
    """Its LoRA adapter, which is being loaded, or needs a slot."""


class HoldCause(Enum):
    """Why a request is held back."""

    UNREAD = auto()
    """Its stream is not read."""
    SUSPECT = auto()
    """Few requests run at a time, to find out which one crashed the worker."""


class PreemptionCause(Enum):
    """Why a sequence loses its row."""

    BLOCKS = auto()
    """A running row needed blocks, and none was free."""
    ORDER = auto()
    """A waiting request that goes first found no room."""
    FEWER_ROWS = auto()
    """Fewer rows may run."""
    SUSPECT = auto()
    """Other requests run alone, to find out which one crashed the worker."""


@dataclass(frozen=True, slots=True)
class AcceptedDetail:
    """The number of requests ahead of it in the queue."""

    position: int


@dataclass(frozen=True, slots=True)
class WaitDetail:
    """What a sequence waited for, with the numbers of the beginning of the wait."""

    cause: WaitCause
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BeganDetail:
    """The number of tokens after the cached prefix whose KV is cached too, but which are computed again because no
    recurrent state was saved after them."""

    num_missed_tokens: int


@dataclass(frozen=True, slots=True)
class DraftDetail:
    """The drafted tokens of a stretch of decoding, and how many of them were accepted."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class PreemptionDetail:
    """Why a sequence lost its row."""

    cause: PreemptionCause
    for_request_id: str = ""
    """The request that got the blocks or the row; for BLOCKS and ORDER."""
    num_blocks: int = 0
    """The number of blocks that this request lacked; for BLOCKS."""


@dataclass(frozen=True, slots=True)
class UpdateDetail:
    """What a caller changed; None: unchanged."""

    priority: int | None
    timeout_s: float | None
    """The time from the change to the new deadline."""
    max_tokens: int | None


Detail = (
    AcceptedDetail
    | WaitDetail
    | BeganDetail
    | DraftDetail
    | PreemptionDetail
    | HoldCause
    | UpdateDetail
    | EngineFinishReason
    | None
)
"""What an entry has besides its steps and tokens, by its kind."""


@dataclass(slots=True, eq=False)
class TimelineEntry:
    """An event, or a state with a duration. Times are by the timeline's clock."""

    kind: EntryKind
    at: float
    until: float | None
    """None: it has not ended."""
    choice: int = 0
    first_step: int | None = None
    last_step: int | None = None
    num_tokens: int = 0
    """Tokens of all steps from the first to the last. The chunks of one entry have equal lengths, one in each step."""
    detail: Detail = None
