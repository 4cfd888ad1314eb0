"""What is measured, as lines of tables: the same fields in every run, so that JSON always has the same keys."""

from dataclasses import dataclass
from typing import Any

BASELINE = "none"
VARIANTS = (
    BASELINE,
    "products by the kernels",
    "products by cuBLAS",
    "late launches",
    "a kernel that merges",
    "undivided turns",
    "fp8 KV",
    "flashinfer",
    "fa",
)
"""The variants of the backend, by name; the first one changes nothing. ``variants`` says what the others do."""


@dataclass(frozen=True)
class Ceiling:
    """What the device does at best."""

    copied_bytes_per_s: float
    """Read and written, by a copy of memory that no cache holds."""
    products_per_s: float
    """Floating-point operations a second of a large product in the models' dtype."""


@dataclass(frozen=True)
class KernelFigures:
    """A kernel on one input: whether it is right, and how near to its limit it runs."""

    model: str
    kernel: str
    case: str
    error: float
    """Largest distance from the reference in fp32, as a share of the reference's largest number; of kernels that
    choose, the share of wrong choices."""
    allowed: float
    is_right: bool
    seconds: float
    limit: str
    """What bounds it: bandwidth or products."""
    share: float
    """Of the time that it takes, what the bytes or products alone would take."""


@dataclass(frozen=True)
class AccuracyFigures:
    """A whole model beside the reference in fp32 with the same weights."""

    model: str
    rows: int
    longest: int
    """Tokens of their prompts, at most."""
    error: float
    """The largest distance of log-probabilities of the likeliest tokens."""
    allowed: float
    is_right: bool
    same_tokens: float
    """The share of rows whose likeliest token is the same."""


@dataclass(frozen=True)
class DecodeFigures:
    """Steps of decoding: every row gains a token."""

    model: str
    kv: str
    """The type of the KV cache's numbers."""
    batch: int
    context: int
    step_s: float
    floor_s: float
    """Weights and KV read once, or the products of the step, whichever takes longer at the ceiling."""
    share: float
    between_s: float
    """From one step's end to the next one's start on the device, the median."""


@dataclass(frozen=True)
class ProfileFigures:
    """A kernel's part of a step."""

    model: str
    step: str
    kernel: str
    calls: float
    """Launches per step."""
    seconds: float
    """Time on the device per step."""
    share: float
    """Of the time of all kernels."""


@dataclass(frozen=True)
class PrefillFigures:
    """A prompt, computed alone."""

    model: str
    tokens: int
    seconds: float
    products_per_s: float
    share: float
    """Of the ceiling of products."""


@dataclass(frozen=True)
class TurnFigures:
    """The first step of a chat's next turn: a few new tokens of one row, whose context is in pages."""

    model: str
    context: int
    tokens: int
    seconds: float
    floor_s: float
    """Weights and KV read once, or the products of the step, whichever takes longer at the ceiling."""
    share: float


@dataclass(frozen=True)
class ChoiceFigures:
    """A product of few tokens in both ways, and the one that the backend chose at its start."""

    model: str
    rows: int
    columns: int
    """Of the weight."""
    tokens: str
    """The numbers of tokens that the choice is for."""
    kernels_s: float
    torch_s: float
    is_torchs: bool


@dataclass(frozen=True)
class VariantFigures:
    """A step with one of the backend's choices made otherwise."""

    model: str
    variant: str
    step: str
    seconds: float
    ratio: float
    """Of the seconds by those without a change; 1 if there are none."""


@dataclass(frozen=True)
class HostMemoryFigures:
    """The first token of a prompt whose KV was evicted."""

    model: str
    tokens: int
    """Of the prompt, in whole blocks."""
    computed_s: float
    """Where it is computed again."""
    restored_s: float
    """Where it comes back from host memory."""
    restored_tokens: int
    """That came back: all, but where computing them was thought to be sooner."""
    copied_bytes: int
    is_right: bool
    """What came back is what was evicted, bit for bit."""


@dataclass(frozen=True)
class DeterministicFigures:
    """The same steps of decoding with and without --deterministic."""

    model: str
    batch: int
    context: int
    tokens_per_s: float
    deterministic_tokens_per_s: float
    cost: float
    """The share of tokens a second that is lost."""
    same_tokens: bool
    """Whether, with the flag, a row gets the same tokens alone and in the batch."""


@dataclass(frozen=True)
class StartFigures:
    """The service from its start to SERVING."""

    model: str
    cache: str
    """What Triton's cache on disk held: nothing new (warm), or perhaps not all (first)."""
    seconds: float


@dataclass(frozen=True)
class ServingFigures:
    """One workload on one engine."""

    model: str
    engine: str
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    """Of each request."""
    tokens_per_s: float
    """Output tokens of all requests."""
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    between_tokens_p50_s: float | None
    between_tokens_p99_s: float | None
    ratio: float | None
    """Tokens a second of ours by those of this engine, where ours has any."""


TABLES: dict[str, type[Any]] = {
    "ceilings": Ceiling,
    "kernels": KernelFigures,
    "accuracy": AccuracyFigures,
    "decode": DecodeFigures,
    "prefill": PrefillFigures,
    "turns": TurnFigures,
    "choices": ChoiceFigures,
    "variants": VariantFigures,
    "profile": ProfileFigures,
    "host_memory": HostMemoryFigures,
    "deterministic": DeterministicFigures,
    "start": StartFigures,
    "serving": ServingFigures,
}
"""By name."""

Figures = (
    Ceiling
    | KernelFigures
    | AccuracyFigures
    | DecodeFigures
    | PrefillFigures
    | TurnFigures
    | ChoiceFigures
    | VariantFigures
    | HostMemoryFigures
    | DeterministicFigures
    | ProfileFigures
    | StartFigures
    | ServingFigures
)


@dataclass(frozen=True)
class LeftOut:
    """What was not measured."""

    part: str
    what: str
    why: str


def table_of(line: Figures) -> str:
    """The table that a line is of."""
    return next(name for name, kind in TABLES.items() if isinstance(line, kind))
