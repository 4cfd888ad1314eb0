"""The recurrent mixers of a layer, as data: they keep a state of a fixed size in place of keys and values, or beside
them. Reads their fields of a config. Does not depend on tensors or files."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.spec_parts import NamedShape, RowFactor

MAX_HEADS, MAX_SIZE, MAX_TAPS = 4096, 1 << 20, 64
_FACTORS = 1e-6, 1e6
"""The least and the largest factor of a config."""


@dataclass(frozen=True)
class ShortConvolution:
    """LFM2's mixer: ``output(c * convolution(b * x))``, where b, c and x are the three parts of a linear of the input,
    and the convolution of each channel is causal. Its state is the last inputs of the convolution."""

    channels: int
    """The hidden size."""
    taps: int
    """The number of inputs that an output of the convolution depends on: the last ones, up to its own."""
    biased: bool
    """Whether the linears and the convolution have biases."""
    convolution = "conv.conv"
    """The checkpoint's name of the convolution's tensors."""
    output = "conv.out_proj"
    matrices = (0, 0, 0)

    @property
    def convolution_biased(self) -> bool:
        """Whether the convolution has a bias."""
        return self.biased

    @property
    def inputs(self) -> dict[str, int]:
        """The linears of the input, with their numbers of rows: b, c and x."""
        return {"conv.in_proj": 3 * self.channels}

    @property
    def output_columns(self) -> int:
        """The input columns of the output linear."""
        return self.channels

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The tensors besides those of the linears and of the convolution."""
        return {}


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta rule (arXiv 2412.06464) of Qwen3-Next and Qwen3.5.

    Queries, keys and values are silu of a causal convolution of a linear of the input; queries and keys have length 1.
    A value head's state S, (key size, value size), becomes ``a S``, then ``S + k beta (v - k S)``, and its output is
    ``q S / sqrt(key size)``, with ``a = exp(-exp(A_log) softplus(alpha + dt_bias))`` and beta after a sigmoid. The
    output linear reads each head's ``rms_norm(output) silu(z)``.
    """

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads: each of these serves as many successive value heads."""
    key_size: int
    value_size: int
    taps: int
    eps: float
    """The norm's epsilon."""
    has_rates: bool = False
    """Whether the tensor ``A_log`` is instead -exp(A_log)."""
    biased = convolution_biased = False
    convolution = "linear_attn.conv1d"
    output = "linear_attn.out_proj"

    @property
    def keys(self) -> int:
        """Columns of all key heads together."""
        return self.num_key_heads * self.key_size

    @property
    def values(self) -> int:
        """Columns of all value heads together."""
        return self.num_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The number of matrices of the state, and their rows and columns."""
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def inputs(self) -> dict[str, int]:
        """The linears of the input, with their numbers of rows: queries, keys and values; z; beta; alpha."""
        rows = {"qkv": self.channels, "z": self.values, "b": self.num_value_heads, "a": self.num_value_heads}
        return {f"linear_attn.in_proj_{name}": count for name, count in rows.items()}

    @property
    def output_columns(self) -> int:
        """The input columns of the output linear."""
        return self.values

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The tensors besides those of the linears and of the convolution."""
        names = ("linear_attn.dt_bias", "linear_attn.A_log")
        return {**dict.fromkeys(names, (self.num_value_heads,)), "linear_attn.norm.weight": (self.value_size,)}


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (arXiv 2405.21060), as in Granite 4.

    x, B and C are silu of a causal convolution of a linear of the input. A head's state S, (state size, head size),
    becomes ``exp(-exp(A_log) d) S + B d x`` with the step ``d = softplus(dt + dt_bias)`` within limits, and its output
    is ``C S + D x``. The output linear reads ``rms_norm(output silu(z))``, normed over each group of heads.
    """

    num_heads: int
    head_size: int
    num_groups: int
    """Each group of as many successive heads has the same B and C."""
    state_size: int
    taps: int
    biased: bool
    """Whether the linears have biases."""
    convolution_biased: bool
    step_limits: tuple[float, float]
    eps: float
    """The norm's epsilon."""
    normed: bool = True
    """Whether there is a norm before the output linear."""
    has_rates: bool = False
    """Whether the tensor ``A_log`` is instead -exp(A_log)."""
    convolution = "mamba.conv1d"
    output = "mamba.out_proj"

    @property
    def values(self) -> int:
        """Columns of all heads together."""
        return self.num_heads * self.head_size

    @property
    def keys(self) -> int:
        """Columns of the B of all groups together, and of C."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """The channels of the convolution: x, B and C."""
        return self.values + 2 * self.keys

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The number of matrices of the state, and their rows and columns."""
        return self.num_heads, self.state_size, self.head_size

    @property
    def inputs(self) -> dict[str, int]:
        """The linears of the input, with their numbers of rows: z, then x, B and C, then dt."""
        return {"mamba.in_proj": self.values + self.channels + self.num_heads}

    @property
    def output_columns(self) -> int:
        """The input columns of the output linear."""
        return self.values

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The tensors besides those of the linears and of the convolution."""
        names = ("mamba.dt_bias", "mamba.A_log", "mamba.D")
        norm = {"mamba.norm.weight": (self.values,)} if self.normed else {}
        return {**dict.fromkeys(names, (self.num_heads,)), **norm}


RecurrentMixer = ShortConvolution | GatedDeltaNet | Mamba2
"""The mixers of all families. Their tensors have the names of most checkpoints."""


def mixer_tensors(mixer: RecurrentMixer, hidden_size: int) -> Iterator[NamedShape]:
    """Yields the name and shape of each of a mixer's tensors within its layer."""
    linears = {name: (rows, hidden_size) for name, rows in mixer.inputs.items()}
    linears[mixer.output] = (hidden_size, mixer.output_columns)
    for name, (rows, columns) in linears.items():
        yield f"{name}.weight", (rows, columns)
        if mixer.biased:
            yield f"{name}.bias", (rows,)
    yield f"{mixer.convolution}.weight", (mixer.channels, 1, mixer.taps)
    if mixer.convolution_biased:
        yield f"{mixer.convolution}.bias", (mixer.channels,)
    yield from mixer.vectors.items()


def state_floats(mixer: RecurrentMixer) -> int:
    """Returns how many numbers the state of a layer has: the last inputs of the convolution, and the matrices."""
    return mixer.channels * (mixer.taps - 1) + math.prod(mixer.matrices)


def read_delta_net(fields: HfConfigReader, eps: float) -> GatedDeltaNet:
    """Reads Qwen's fields. Raises ModelError."""
    net = GatedDeltaNet(
        num_key_heads=fields.integer("linear_num_key_heads", 1, MAX_HEADS, 16),
        num_value_heads=fields.integer("linear_num_value_heads", 1, MAX_HEADS, 32),
        key_size=fields.integer("linear_key_head_dim", 1, MAX_SIZE, 128),
        value_size=fields.integer("linear_value_head_dim", 1, MAX_SIZE, 128),
        taps=fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, 4),
        eps=eps,
    )
    if net.num_value_heads % net.num_key_heads:
        raise fields.wrong("linear_num_value_heads", f"must be a multiple of linear_num_key_heads, {net.num_key_heads}")
    _check_silu(fields)
    return net


def read_mamba2(fields: HfConfigReader, inner: int, eps: float) -> Mamba2:
    """Reads Granite's and Falcon-H1's fields. ``inner`` is the number of all heads' columns. Raises ModelError."""
    heads = fields.integer("mamba_n_heads", 1, MAX_HEADS, 128)
    groups = fields.integer("mamba_n_groups", 1, heads, 1)
    if inner % heads or heads % groups:
        raise fields.wrong("mamba_n_heads", f"must divide {inner}, and be a multiple of mamba_n_groups, {groups}")
    size = inner // heads  # which the config may call auto
    if not fields.is_text("mamba_d_head") and fields.integer("mamba_d_head", 1, MAX_SIZE, size) != size:
        raise fields.wrong("mamba_d_head", f"must be {inner} divided by mamba_n_heads")
    _check_silu(fields)
    limits = (0.0, math.inf)
    if "time_step_limit" in fields:
        least, most = fields.numbers("time_step_limit", 2, 0.0, math.inf)
        limits = least, most
    return Mamba2(
        num_heads=heads,
        head_size=size,
        num_groups=groups,
        state_size=fields.integer("mamba_d_state", 1, MAX_SIZE, 256),
        taps=fields.integer("mamba_d_conv", 2, MAX_TAPS, 4),
        biased=fields.flag("mamba_proj_bias", False),
        convolution_biased=fields.flag("mamba_conv_bias", True),
        step_limits=limits,
        eps=eps,
    )


def read_nemotrons_mamba2(fields: HfConfigReader, eps: float) -> Mamba2:
    """Reads Nemotron-H's fields. Raises ModelError."""
    heads = fields.integer("mamba_num_heads", 1, MAX_HEADS, 128)
    groups = fields.integer("n_groups", 1, heads, 8)
    if heads % groups:
        raise fields.wrong("mamba_num_heads", f"must be a multiple of n_groups, {groups}")
    _check_silu(fields, "mamba_hidden_act")
    return Mamba2(
        num_heads=heads,
        head_size=fields.integer("mamba_head_dim", 1, MAX_SIZE, 64),
        num_groups=groups,
        state_size=fields.integer("ssm_state_size", 1, MAX_SIZE, 128),
        taps=fields.integer("conv_kernel", 2, MAX_TAPS, 4),
        biased=fields.flag("use_bias", False),
        convolution_biased=fields.flag("use_conv_bias", True),
        step_limits=(fields.number("time_step_min", 0.0, 1e6, 0.001), math.inf),
        eps=eps,
    )


def read_falcons_mamba2(fields: HfConfigReader, hidden_size: int, eps: float) -> Mamba2:
    """Reads Falcon-H1's fields. Raises ModelError."""
    inner = fields.integer("mamba_expand", 1, 64, 2) * hidden_size
    if not fields.is_null("mamba_d_ssm"):
        inner = fields.integer("mamba_d_ssm", 1, MAX_SIZE, 1024)
    mamba = replace(read_mamba2(fields, inner, eps), normed=fields.flag("mamba_rms_norm", False))
    if mamba.normed and fields.flag("mamba_norm_before_gate", True):
        raise fields.wrong("mamba_norm_before_gate", "must be false in a model with mamba_rms_norm")
    if fields.flag("projectors_bias", False) != mamba.biased:
        raise fields.wrong("projectors_bias", "must be the same as mamba_proj_bias")
    return mamba


def falcons_factors(fields: HfConfigReader, mamba: Mamba2) -> list[RowFactor]:
    """Reads Falcon-H1's factors of what linears read and write. Raises ModelError."""

    def factor(name: str) -> float:
        return fields.number(name, *_FACTORS, 1.0)

    def several(name: str, count: int) -> tuple[float, ...]:
        given = name in fields and not fields.is_null(name)
        return fields.numbers(name, count, *_FACTORS) if given else (1.0,) * count

    read, attended, state_read = (factor(f"{name}_multiplier") for name in ("attention_in", "attention_out", "ssm_in"))
    gate, down = several("mlp_multipliers", 2)
    outputs = {
        "self_attn.o_proj": attended, "mamba.out_proj": factor("ssm_out_multiplier"), "mlp.gate_proj": gate,
        "mlp.down_proj": down,
    }  # fmt: skip
    found = [RowFactor(f"{name}.{part}", by) for name, by in outputs.items() for part in ("weight", "bias")]
    found += [RowFactor(f"self_attn.{name}_proj.weight", read) for name in "qkv"]
    found.append(RowFactor("mamba.in_proj.weight", state_read))
    begin = 0
    sizes = mamba.values, mamba.values, mamba.keys, mamba.keys, mamba.num_heads  # z, x, B, C, dt
    for size, by in zip(sizes, several("ssm_multipliers", 5), strict=True):
        found += [RowFactor(f"mamba.in_proj.{part}", by, begin, begin + size) for part in ("weight", "bias")]
        begin += size
    return [each for each in found if each.factor != 1.0]


def _check_silu(fields: HfConfigReader, name: str = "hidden_act") -> None:
    if fields.text(name, "silu") not in ("silu", "swish"):
        raise fields.wrong(name, "must be silu in a model with these recurrent layers")
