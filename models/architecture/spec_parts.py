"""The parts of a ``ModelSpec``: what differs between families of decoders, as data."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

NamedShape = tuple[str, tuple[int, ...]]
"""A tensor's name and shape."""


class Activation(Enum):
    """The activation of the MLP: ``act(gate) * up``, or ``act(up)`` without a gate."""

    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()
    RELU = auto()
    RELU_SQUARED = auto()


@dataclass(frozen=True)
class DefaultRope:
    """Rotary embedding as first published: pair i of a head of D turns by ``position * theta^(-2i/D)``."""

    theta: float


@dataclass(frozen=True)
class LinearRope:
    """Every frequency is divided by ``factor``."""

    theta: float
    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Long wavelengths are divided by ``factor``, short ones kept, those between interpolated smoothly."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): frequencies blend by a ramp between the rotations ``beta_slow`` and ``beta_fast``, and
    cosines and sines are scaled by ``attention_factor``."""

    theta: float
    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753) within the original context: the frequency of pair i is divided by ``factors[i]``,
    and cosines and sines are scaled by ``attention_factor``."""

    theta: float
    factors: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class ProportionalRope:
    """Only the first ``part`` of a head's pairs turn; each by the angle of ``DefaultRope``, divided by ``factor``."""

    theta: float
    factor: float
    part: float


@dataclass(frozen=True)
class NoRope:
    """Queries and keys are not rotated."""


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope | NoRope


@dataclass(frozen=True)
class PositionTable:
    """An embedding of positions, which is added to that of tokens: position p has row p + ``offset``."""

    num_rows: int
    offset: int


@dataclass(frozen=True)
class QueryScaling:
    """Llama 4's scaling of queries: at position p by ``1 + beta ln(1 + floor((p + shift) / original_max_positions))``,
    with a shift of 0 or 1."""

    beta: float
    original_max_positions: int
    shift: int = 0
    only_unrotated: bool = False
    """Whether only layers that rotate nothing scale their queries."""


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of some layers' attention, whose heads are rotated as a whole."""

    num_kv_heads: int
    head_dim: int
    values_are_keys: bool
    """Whether values are the outputs of the keys' linear, before any norm: there is no linear for values."""


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of every layer that depend on the token (Gemma 3n). For layer l, e is the token's embedding of ``size``
    for that layer, and p its part of a linear of x before the first layer: ``i = (e sqrt(size) + norm(p /
    sqrt(hidden_size))) / sqrt(2)``. A layer ends with ``x += norm(projection(act(gate(x)) * i))``."""

    vocab_size: int
    size: int


class NormKind(Enum):
    """The kind of all norms of a model."""

    RMS = auto()
    """x / sqrt(mean(x^2) + eps)"""
    LAYER = auto()
    """The same of x - mean(x)."""


class NormPlacement(Enum):
    """The placement of a layer's norms. In the formulas, f is attention or the MLP."""

    PRE = auto()
    """x += f(norm(x))"""
    BOTH = auto()
    """x += norm(f(norm(x)))"""
    POST = auto()
    """x += norm(f(x))"""
    PARALLEL = auto()
    """x += attention(y) + mlp(y), where y = norm(x)"""
    PARALLEL_NORMS = auto()
    """x += attention(norm(x)) + mlp(norm(x)), with two norms"""


class QkNorm(Enum):
    """The norm of queries and keys."""

    NONE = auto()
    HEAD = auto()
    """Over each head; all heads share a weight."""
    EACH_HEAD = auto()
    """Over each head, which has a weight of its own."""
    ALL = auto()
    """Over all query heads as one vector, and over all key heads as one."""
    UNWEIGHTED = auto()
    """Over each head, without a weight, and only in layers that rotate queries and keys."""


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's activation: ``g sigmoid(alpha g) (u + 1)``, where g is gate limited to at most ``limit``, and u is up
    limited to [-limit, limit].
    """

    alpha: float
    limit: float


class Scoring(Enum):
    """The way in which a router's outputs become the experts' scores."""

    SOFTMAX = auto()
    """The softmax over all experts."""
    SIGMOID = auto()
    """The sigmoid of each expert's output."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts instead of the MLP: the sum of the outputs of the ``per_token`` experts with the highest
    scores, each multiplied by its score.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    normalise: bool
    """Whether the chosen scores are divided by their sum; of a softmax, this is one over only the chosen experts."""
    biased: bool
    """Whether the router and the experts' linears have biases."""
    gate: ClampedGate | None
    """The activation of the experts, if it is not ``act(gate) * up``."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others have the MLP."""
    scoring: Scoring = Scoring.SOFTMAX
    selection_bias: bool = False
    """Whether experts are chosen by score plus a bias. The outputs are multiplied by the scores without it."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are chosen from the groups whose two highest scores, with the bias, have the largest sums."""
    scale: float = 1.0
    """The factor of the scores that the outputs are multiplied by."""
    shared_size: int = 0
    """The intermediate size of an MLP that every token also runs through; 0: there is none."""
    shared_gated: bool = False
    """Whether that MLP's output is multiplied by the sigmoid of a linear of its input."""
    scales_inputs: bool = False
    """Whether the scores multiply the experts' inputs, not their outputs."""
    beside_mlp: bool = False
    """Whether layers with experts have the MLP too: the sum is ``norm(mlp(norm(x))) + norm(experts(norm(x)))``, the
    router reads a third norm of x, and each expert's output has a factor of its own."""


def linear_tensors(name: str, rows: int, columns: int, biased: bool) -> Iterator[NamedShape]:
    """Yields the tensors of a linear."""
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


def mlp_tensors(name: str, hidden: int, inner: int, biased: bool, gated: bool = True) -> Iterator[NamedShape]:
    """Yields the tensors of an MLP."""
    for part in ("gate_proj", "up_proj") if gated else ("up_proj",):
        yield from linear_tensors(f"{name}.{part}", inner, hidden, biased)
    yield from linear_tensors(f"{name}.down_proj", hidden, inner, biased)
