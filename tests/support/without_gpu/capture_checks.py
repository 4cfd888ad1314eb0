"""What a CUDA graph refuses to capture, checked where there is no GPU."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.models.backends.cuda.steps.graphs import StepGraphs

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default: "reads a number from the device",
    aten.lift_fresh.default: "makes a tensor of numbers, which are copied to the device",
    aten.nonzero.default: "has a result whose size the host needs",
    aten.masked_select.default: "has a result whose size the host needs",
    aten._unique2.default: "has a result whose size the host needs",
    aten.repeat_interleave.Tensor: "has a result whose size the host needs",
}


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails for operations that wait for the device or copy memory that is not pinned."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with self:  # an operation that consists of others is not one of WAITS, but one of the others may be
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls an operation that consists of no others."""
        reason = WAITS.get(func)
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            reason = "selects by a mask, whose sum the host needs" if masks else None
        assert reason is None, f"a CUDA graph cannot capture {func}: it {reason}"
        return func(*args, **kwargs)


def check_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, both halves of every step that a GPU would capture run under ``Capture``."""
    init, launch = StepGraphs.__init__, KernelVariant.launch

    def under_capture(half: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with Capture():  # type: ignore[no-untyped-call]
                return half(*args)

        return run

    def init_checked(self: Any, forward: Any, choose: Any, device: torch.device) -> None:
        init(self, under_capture(forward), under_capture(choose), device)

    def launch_unchecked(self: KernelVariant, *args: Any, **named: Any) -> None:
        with _disable_current_modes():  # the interpreter reads what a kernel reads
            launch(self, *args, **named)

    monkeypatch.setattr(StepGraphs, "__init__", init_checked)
    monkeypatch.setattr(KernelVariant, "launch", launch_unchecked)
