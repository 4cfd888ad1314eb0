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


LATENT_NORM_EPS = 1e-6
"""Added to the mean square in the norms of latents, whatever the other norms add, as in transformers."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    A token's keys and values follow from one vector, which is cached: a rotated part of ``qk_rope_head_dim``, which is
    part of the keys of all heads, and a latent of ``kv_lora_rank``, from which ``kv_b_proj`` computes the other part of
    each head's key, ``qk_nope_head_dim``, and its value, ``v_head_dim``. Backends compute the absorbed form: a head's
    query is multiplied by its matrix of keys, all heads attend to the cached vector, and the weighted mean of latents
    is multiplied by the head's matrix of values. A backend gets the rows of projections in an order in which the
    rotated part of a head comes first.
    """

    q_lora_rank: int | None
    """The size of the latent that queries are computed from; None: they are computed from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    splits_kv: bool = False
    """Whether ``kv_b_proj`` is two tensors, as in GGUF files: each head's matrix of keys, turned, in ``k_b_proj``, and
    its matrix of values in ``v_b_proj``."""

    @property
    def qk_head_dim(self) -> int:
        """The size of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """The size of the vector that is cached."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    def first_rows(self, num_heads: int) -> dict[str, int]:
        """Returns the linears of the hidden state with their numbers of rows: that of the cached vector, and that of
        queries or of their latent."""
        queries = {"q_proj": num_heads * self.qk_head_dim}
        if self.q_lora_rank is not None:
            queries = {"q_a_proj": self.q_lora_rank}
        return {"kv_a_proj_with_mqa": self.cached_dim, **queries}

    def latent_tensors(self, num_heads: int) -> dict[str, tuple[int, ...]]:
        """Returns the other tensors of a layer's attention, except for the output projection, with their shapes."""
        queries: dict[str, tuple[int, ...]] = {}
        if self.q_lora_rank is not None:
            queries = {
                "q_a_layernorm.weight": (self.q_lora_rank,),
                "q_b_proj.weight": (num_heads * self.qk_head_dim, self.q_lora_rank),
            }
        rank, keys, values = self.kv_lora_rank, num_heads * self.qk_nope_head_dim, num_heads * self.v_head_dim
        kv = {"kv_b_proj.weight": (keys + values, rank)}
        if self.splits_kv:
            kv = {
                "k_b_proj.weight": (num_heads * rank, self.qk_nope_head_dim),
                "v_b_proj.weight": (values, rank),
            }
        return {**queries, "kv_a_layernorm.weight": (rank,), **kv}


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

    @property
    def norms(self) -> tuple[str | None, str | None, str | None, str | None]:
        """Their names: before and after attention, before and after the MLP; None where there is none."""
        match self:
            case NormPlacement.PRE:
                return "input_layernorm", None, "post_attention_layernorm", None
            case NormPlacement.BOTH:
                return (
                    "input_layernorm",
                    "post_attention_layernorm",
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                )
            case NormPlacement.POST:
                return None, "post_attention_layernorm", None, "post_feedforward_layernorm"
            case NormPlacement.PARALLEL:
                return "input_layernorm", None, None, None
            case NormPlacement.PARALLEL_NORMS:
                return "input_layernorm", None, "post_attention_layernorm", None


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
    """The activation of the experts, if it is not that of the MLP."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others have the MLP."""
    scoring: Scoring = Scoring.SOFTMAX
    selection_bias: bool = False
    """Whether experts are chosen by score plus a bias. The outputs are multiplied by the scores without it."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are chosen from the groups with the highest scores. Of sigmoids, a group's score is the sum of the two
    highest, with the bias; of a softmax it is the highest one."""
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

    @property
    def is_plain_softmax(self) -> bool:
        """Whether the scores are a softmax over all groups, without a factor."""
        return self.scoring is Scoring.SOFTMAX and self.num_groups == 1 and self.scale == 1.0

    def tensors(self, hidden: int, gated: bool) -> Iterator[NamedShape]:
        """Yields the tensors of a layer with experts, except for norms."""
        if self.beside_mlp:
            yield "mlp.gate.per_expert_scale", (self.num_experts,)
        yield from linear_tensors("mlp.gate", self.num_experts, hidden, self.biased)
        if self.selection_bias:
            yield "mlp.gate.e_score_correction_bias", (self.num_experts,)
        if self.shared_size:
            yield from mlp_tensors("mlp.shared_expert", hidden, self.shared_size, self.biased, gated)
        if self.shared_gated:
            yield "mlp.shared_expert_gate.weight", (1, hidden)
        for expert in range(self.num_experts):
            yield from mlp_tensors(f"mlp.experts.{expert}", hidden, self.intermediate_size, self.biased, gated)


@dataclass(frozen=True)
class RowFactor:
    """A constant by which backends multiply a tensor, or some successive rows of it, when they load it."""

    tensor: str
    """Its name within its layer. All layers have the same factors."""
    factor: float
    begin: int = 0
    end: int | None = None

    @property
    def rows(self) -> slice:
        """The rows that are multiplied."""
        return slice(self.begin, self.end)


def linear_tensors(name: str, rows: int, columns: int, biased: bool) -> Iterator[NamedShape]:
    """Yields the tensors of a linear."""
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


def mlp_tensors(name: str, hidden: int, inner: int, biased: bool, gated: bool = True) -> Iterator[NamedShape]:
    """Yields the tensors of an MLP, or of an expert."""
    for part in ("gate_proj", "up_proj") if gated else ("up_proj",):
        yield from linear_tensors(f"{name}.{part}", inner, hidden, biased)
    yield from linear_tensors(f"{name}.down_proj", hidden, inner, biased)
