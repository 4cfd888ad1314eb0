"""A kernel with all that its code depends on: what launches it, warms it up and compiles it ahead of time.

Triton compiles a kernel anew for each new kind of argument: a type, a constant, and, unless the kernel forbids it, a
number that is 1 or a multiple of 16. Here a variant names types and constants, kernels forbid the rest
(``do_not_specialize``), and pointers are always aligned, so a variant is compiled once.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from penstock.kernels.cuda.core.interpreter import patch_language_once

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Of pointers, in bytes."""

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
"""What Triton calls them."""


@dataclass(frozen=True, eq=False)
class KernelVariant:
    """One compiled form of a kernel. Made once, by a cached function of what it depends on."""

    kernel: Any
    """A function under ``triton.jit``, whose numbers are in ``do_not_specialize``."""
    arguments: Mapping[str, torch.dtype | str]
    """Types of what varies from call to call, in the order of ``launch``: a tensor's dtype, or Triton's name of a
    number's."""
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2

    def launch(self, grid: tuple[int, ...], *values: Tensor | int | float | None) -> None:
        """Runs the kernel; ``values`` are the arguments in their order. A tensor has the dtype that was named."""
        assert len(values) == len(self.arguments), (len(values), list(self.arguments))
        for (name, wanted), value in zip(self.arguments.items(), values, strict=True):
            if isinstance(wanted, torch.dtype):
                assert isinstance(value, Tensor), name
                assert value.dtype == wanted, (name, value.dtype, wanted)
                assert value.data_ptr() % ALIGNMENT == 0, name
        launches.note(self)
        # By name: constants may stand between them.
        named = dict(zip(self.arguments, values, strict=True))
        self.kernel[grid](**named, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)

    def compile(self, capability: int) -> CompiledKernel:
        """For a GPU of that compute capability, 90 for Hopper; needs none. Not under TRITON_INTERPRET."""
        signature = {
            name: f"*{TYPES[kind]}" if isinstance(kind, torch.dtype) else kind for name, kind in self.arguments.items()
        }
        pointers = [name for name, kind in self.arguments.items() if isinstance(kind, torch.dtype)]
        source = ASTSource(
            self.kernel,
            signature={**signature, **dict.fromkeys(self.constants, "constexpr")},
            constexprs=dict(self.constants),
            attrs={(self.kernel.arg_names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in pointers},
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(triton.knobs.runtime.interpret)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program on that GPU can have."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


class Launches:
    """Tells when a kernel is compiled after the warm-up: a request waits for that, which is a fault of the warm-up."""

    def __init__(self) -> None:
        self.late = 0
        """Kernels that were compiled too late."""
        self.warmed: set[KernelVariant] = set()
        """What the last warm-up launched."""
        self._known: set[KernelVariant] = set()
        self._is_warm = False

    @contextmanager
    def warming(self) -> Iterator[None]:
        """In which everything is to be launched that ever will be."""
        self._is_warm = False
        self.warmed = set()
        yield
        self._is_warm = True
        triton.knobs.runtime.jit_post_compile_hook = self._on_compiled

    def note(self, variant: KernelVariant) -> None:
        """A launch."""
        if not self._is_warm:
            self.warmed.add(variant)
        if variant not in self._known:
            self._known.add(variant)
            if interpreted():
                patch_language_once()
            if self._is_warm:
                self._tell(f"{variant.kernel.fn.__name__} {dict(variant.constants)}")

    def _on_compiled(self, **of: Any) -> None:
        """Triton's own word: it may tell forms of a variant apart."""
        if self._is_warm:
            self._tell(str(of.get("repr")))

    def _tell(self, what: str) -> None:
        self.late += 1
        logger.error("a kernel was compiled while requests waited, which is a fault of the warm-up: %s", what)


launches = Launches()
"""Of this process."""
