"""Kernel variants: launches them, warms them up, and compiles them ahead of time.

Triton compiles a kernel again for each new kind of argument: a type, a constant, and, unless the kernel forbids it, a
number that is 1 or a multiple of 16. Here a variant fixes types and constants, kernels forbid the rest
(``do_not_specialize``), and pointers are always aligned, so each variant is compiled once.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.errors import OutOfResources

from penstock.kernels.cuda.core.interpreter import patch_language_once

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""The alignment of pointers, in bytes."""

MIN_CAPABILITY = 80
"""The first compute capability that kernels compile for: Ampere."""
FP8_CAPABILITY = 89
"""The first with products and conversions of fp8."""
PDL_CAPABILITY = 90
"""The first with programmatic dependent launch."""
WIDE_PRODUCTS = (9, 10)
"""The major versions with wide matrix products (wgmma, tcgen05). Version 12 does not have them."""

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
"""Triton's names of dtypes."""


@dataclass(frozen=True, eq=False)
class KernelVariant:
    """One compiled form of a kernel. Create it in a cached function of everything it depends on, so that it exists
    once."""

    kernel: Any
    """A function under ``triton.jit``, whose numbers are in ``do_not_specialize``."""
    arguments: Mapping[str, torch.dtype | str | None]
    """The types of the arguments that vary from call to call, in the order of ``launch``: a tensor's dtype, Triton's
    name for the type of a number, or None for a tensor that this variant does not have."""
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    """The number of stages on Hopper. A GPU with less shared memory gets as many as fit."""

    def launch(
        self, grid: tuple[int, ...], *values: Tensor | int | float | None, **named: Tensor | int | float | None
    ) -> None:
        """Runs the kernel. The arguments are given in the order of ``arguments`` or by name; tensors must have the
        dtypes given there."""
        # By name, since constants may come between them.
        named = named or dict(zip(self.arguments, values, strict=True))
        assert named.keys() == self.arguments.keys(), (list(named), list(self.arguments))
        for name, wanted in self.arguments.items():
            value = named[name]
            if isinstance(wanted, torch.dtype):
                assert isinstance(value, Tensor), name
                assert value.dtype == wanted, (name, value.dtype, wanted)
                assert value.data_ptr() % ALIGNMENT == 0, name
            assert (value is None) == (wanted is None), name
        launches.note(self)
        try:
            self.kernel[grid](**named, **self._settings)
        except OutOfResources:  # at the first launch, which is in the warm-up
            if self._settings["num_stages"] == 1:
                raise
            self._settings["num_stages"] -= 1
            self.launch(grid, **named)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The constants and options on this machine's GPU."""
        constants, options = self._for_capability(active_capability())
        return constants | options

    def _for_capability(self, capability: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the constants, and Triton's options."""
        constants, options = dict(self.constants), {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if "PDL" in self.kernel.arg_names:  # the kernel waits for the one before it: see ``await_inputs``
            constants["PDL"] = capability >= PDL_CAPABILITY
            if capability >= PDL_CAPABILITY:
                options["launch_pdl"] = True
        return constants, options

    @property
    def absent(self) -> dict[str, None]:
        """The arguments that this variant does not have."""
        return {name: None for name, kind in self.arguments.items() if kind is None}

    def compile(self, capability: int) -> CompiledKernel:
        """Compiles for a compute capability, such as 90 for Hopper, without a GPU. Does not work under
        TRITON_INTERPRET."""
        pointers = {name: f"*{TYPES[kind]}" for name, kind in self.arguments.items() if isinstance(kind, torch.dtype)}
        numbers = {name: kind for name, kind in self.arguments.items() if isinstance(kind, str)}
        constants, options = self._for_capability(capability)
        constants |= self.absent
        source = ASTSource(
            self.kernel,
            signature={**pointers, **numbers, **dict.fromkeys(constants, "constexpr")},
            constexprs=constants,
            attrs={(self.kernel.arg_names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in pointers},
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(triton.knobs.runtime.interpret)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous and starts at an address that kernels can read from."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def capability_of(device: torch.device) -> int:
    """The compute capability of a GPU, such as 90 for Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def active_capability() -> int:
    """Returns the compute capability of the GPU that kernels are launched on; 0 in the interpreter."""
    return 0 if interpreted() else int(triton.runtime.driver.active.get_current_target().arch)


def has_wide_products(capability: int) -> bool:
    """Returns whether GPUs of a compute capability have ``WIDE_PRODUCTS``. The interpreter runs their kernels."""
    return capability == 0 or capability // 10 in WIDE_PRODUCTS


def shared_bytes_of(device: torch.device) -> int:
    """The shared memory that one program can have on a GPU, in bytes."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


class Launches:
    """Detects kernels that are compiled after the warm-up. A request waits for the compilation, so the warm-up was
    incomplete."""

    def __init__(self) -> None:
        self.late = 0
        """The number of kernels that were compiled after the warm-up."""
        self.warmed: set[KernelVariant] = set()
        """The variants that the last warm-up launched."""
        self._known: set[KernelVariant] = set()
        self._is_warm = False

    @contextmanager
    def warming(self) -> Iterator[None]:
        """The warm-up: every variant that will ever be used must be launched in this context."""
        self._is_warm = False
        self.warmed = set()
        yield
        self._is_warm = True
        triton.knobs.runtime.jit_post_compile_hook = self._on_compiled

    def note(self, variant: KernelVariant) -> None:
        if not self._is_warm:
            self.warmed.add(variant)
        if variant not in self._known:
            self._known.add(variant)
            if interpreted():
                patch_language_once()
            if self._is_warm:
                self._report_late(f"{variant.kernel.fn.__name__} {dict(variant.constants)}")

    def _on_compiled(self, **of: Any) -> None:
        """Called by Triton after each compilation. It may compile several forms of one variant."""
        if self._is_warm:
            self._report_late(str(of.get("repr")))

    def _report_late(self, what: str) -> None:
        self.late += 1
        logger.error("a kernel was compiled while requests waited, because the warm-up missed it: %s", what)


launches = Launches()
"""The launches of this process."""
