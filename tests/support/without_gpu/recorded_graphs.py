"""CUDA graphs without a GPU. A capture records operations and launches with their tensors and numbers, and a replay
repeats them. So what a step computed in Python, or keeps in memory that other graphs overwrite, has wrong values when
the graph is replayed on other inputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from without_gpu.capture_checks import Capture

from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.models.backends.cuda.steps.graphs import StepGraphs


class Pool:
    """The memory of graphs. torch frees it with the last of them, and then captures nothing more in it."""

    def __init__(self) -> None:
        self.graphs: WeakSet[RecordedGraph] = WeakSet()


class RecordedGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    recording: "RecordedGraph | None" = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.allocated: list[Tensor] = []
        """The tensors in the graph's memory."""
        self._pool = Pool()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def pool(self) -> Pool:
        """Likewise."""
        return self._pool

    @contextmanager
    def capturing(self, pool: Pool | None) -> Iterator[None]:
        """Records what is called in this context. It computes too, but memory is afterwards what it was before."""
        if pool is not None:
            assert pool.graphs, "the pool was freed with its last graph"
            self._pool = pool
        self._pool.graphs.add(self)
        RecordedGraph.recording = self
        try:
            with Recording(self):
                yield
        finally:
            RecordedGraph.recording = None
        for memory, content in self._before.values():
            memory.copy_(content)
        self._before.clear()

    def keep(self, arguments: object) -> None:
        """Notes what is in the memory of tensors before the first call that may change it."""
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, Tensor) and _memory_of(tensor) not in self._before:
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[_memory_of(tensor)] = memory, memory.clone()

    def replay(self) -> None:
        """Computes again. Other graphs have used the memory since."""
        for tensor in self.allocated:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        for call in self.calls:
            call()


class Recording(Capture):
    """Records the operations of a capture, which are those that a CUDA graph can capture."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._graph.keep((args, kwargs))
        made = super().call(func, args, kwargs)
        given = {_memory_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        # Views are of memory that was there before, and operations in place return it.
        allocated = {
            index: value
            for index, value in enumerate(tree_leaves(made))
            if isinstance(value, Tensor) and _memory_of(value) not in given
        }
        self._graph.allocated += allocated.values()
        if "empty" not in str(func):
            self._graph.calls.append(partial(_repeat, partial(func, *args, **kwargs), allocated))
        return made


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _repeat(call: Callable[[], object], allocated: Mapping[int, Tensor]) -> None:
    made = tree_leaves(call())
    for index, tensor in allocated.items():
        tensor.copy_(made[index])


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, backends that are loaded capture their steps and replay them, as on a GPU."""
    init, launch = StepGraphs.__init__, KernelVariant.launch

    def init_for_gpu(self: Any, forward: Any, choose: Any, device: torch.device) -> None:
        init(self, forward, choose, SimpleNamespace(type="cuda"))  # type: ignore[arg-type]

    def capture(graph: RecordedGraph, *, pool: Pool | None, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"  # another thread waits for results
        return graph.capturing(pool)

    def launch_recorded(self: KernelVariant, *args: Any, **named: Any) -> None:
        with _disable_current_modes():  # the interpreter reads what a kernel reads
            if RecordedGraph.recording:
                RecordedGraph.recording.keep((args, named))
                RecordedGraph.recording.calls.append(partial(launch, self, *args, **named))
            launch(self, *args, **named)

    monkeypatch.setattr(StepGraphs, "__init__", init_for_gpu)
    monkeypatch.setattr(KernelVariant, "launch", launch_recorded)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
