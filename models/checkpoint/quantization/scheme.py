"""What a quantised checkpoint is, whatever tool wrote it."""

from dataclasses import dataclass
from enum import Enum, auto

from penstock.models.checkpoint.quantization.module_patterns import ModulePatterns

MX_GROUP = 32
"""The number of columns in a group of MXFP4."""
NV_GROUP = 16
"""The number of columns in a group of NVFP4."""


class QuantLayout(Enum):
    """How a quantised matrix is stored."""

    GPTQ = auto()
    """Four or eight bits, packed along the columns; zero points are stored minus one."""
    GPTQ_V2 = auto()
    """The same, with zero points as they are."""
    AWQ = auto()
    """Four bits, packed along the rows, interleaved."""
    PACKED = auto()
    """compressed-tensors' four bits, packed along the columns."""
    INT8 = auto()
    """compressed-tensors' signed bytes; activations are quantised at run time."""
    FP8 = auto()
    """float8_e4m3fn, from compressed-tensors, Model Optimizer or the method fp8."""
    Q4_0 = auto()
    """GGUF's blocks of 32 columns: a scale, then four-bit codes."""
    MXFP4 = auto()
    """Four-bit floats, packed along the columns, with a power of two for each group: gpt-oss's experts, and
    compressed-tensors."""
    NVFP4 = auto()
    """The same with groups of 16, whose scales are float8_e4m3fn, and one more scale for the matrix."""


@dataclass(frozen=True)
class QuantScheme:
    """How the weights of some linears are quantised: ``W = (code - zero) * scale``."""

    layout: QuantLayout
    group: int
    """The number of columns that share a scale and a zero point; 0: all columns of a row."""
    has_zeros: bool = False
    """Whether zero points are stored. If not, they are the middle of the codes."""
    is_ordered: bool = False
    """Whether a stored index assigns each column to a group."""
    rows: int = 1
    """The number of rows that share scales, for FP8; 0: all."""
    is_wide: bool = False
    """Whether codes of GPTQ have eight bits."""
    narrows_inputs: bool = False
    """Whether inputs are quantised too, at run time: per token, and per group of columns if weights have groups."""

    @property
    def bits(self) -> int:
        return 8 if self.is_wide or self.layout in (QuantLayout.INT8, QuantLayout.FP8) else 4

    @property
    def is_float(self) -> bool:
        return self.layout in (QuantLayout.FP8, QuantLayout.MXFP4, QuantLayout.NVFP4)

    def num_row_groups(self, rows: int) -> int:
        """The number of groups in a column; the last one may be short."""
        return -(-rows // self.rows) if self.rows else 1

    def num_groups(self, columns: int) -> int:
        """The number of groups in a row; the last one may be short."""
        return -(-columns // self.group) if self.group else 1


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint."""

    method: str
    """gptq, awq, compressed-tensors, fp8, mxfp4, modelopt or gguf."""
    schemes: tuple[tuple[ModulePatterns, QuantScheme], ...]
    """Each linear has the scheme whose patterns match it most precisely."""
    ignored: ModulePatterns
    """Linears that stay float."""

    def scheme_of(self, module: str) -> QuantScheme | None:
        """The scheme of the linear of this name; None if it stays float, though it may only be missing in the list."""
        if module in self.ignored:
            return None
        # If two match equally precisely, the first one wins.
        by_precision = {names.precision(module): scheme for names, scheme in reversed(self.schemes)}
        return next((by_precision[at] for at in range(3) if at in by_precision), None)
