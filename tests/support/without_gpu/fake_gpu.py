"""A driver for Triton that compiles for a GPU and launches nothing: what is launched, and in which form, can be tested
without a GPU. Results are whatever the memory held."""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget


@dataclass
class FakeGpu:
    """Tensors stay on the CPU. TRITON_INTERPRET must not be set."""

    capability: int = 90
    shared_bytes: int = 227 << 10
    launched: list[str] = field(default_factory=list)
    """The kernels, in order."""

    def install(self) -> None:
        """Makes this Triton's driver."""
        triton.runtime.driver.set_active(self)

    @property
    def utils(self) -> "FakeGpu":
        return self

    @property
    def launcher_cls(self) -> Any:
        launched = self.launched

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.name = metadata.name

            def __call__(self, *arguments: object, **named: object) -> None:
                launched.append(self.name)

        return Launcher

    binary_ext = "cubin"

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 64, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared_bytes, "multiprocessor_count": 132}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
