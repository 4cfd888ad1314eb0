"""Computes the gradient of a batch on several threads that take micro-batches from a queue.

On a CPU each thread uses one core. If kernels were split over all cores, every kernel would wait for the core that
other work slows down. Here only the end of a step waits, so a low-priority run loses little beside other work.
"""

import argparse
import ctypes
import queue
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.models.train_demo.network import Network, rotary_tables

Trained = TypeVar("Trained", bound=Network)
Loss = Callable[[Trained, Tensor, Tensor, Tensor], Tensor]
"""Takes a network, ids `(rows, length + 1)` and the rotary tables of `length` positions; returns a mean in nats."""


def keep_freed_memory() -> None:
    """Stops glibc from giving large tensors' memory back to the kernel: page faults took a fifth of a step's time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-8, 1)  # M_ARENA_MAX
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 2**28)  # M_TOP_PAD


class Gradients(Generic[Trained]):
    """Adds a batch's gradient to `model`'s parameters. The replicas share parameters with it, not gradients."""

    def __init__(
        self, model: Trained, make_replica: Callable[[], Trained], loss: Loss[Trained], args: argparse.Namespace
    ) -> None:
        self.model = model
        self.loss = loss
        self.device: str = args.device
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.micro_tokens: int = args.micro_tokens
        self.replicas = [model]
        num_workers = args.threads if args.device == "cpu" else 1
        for _ in range(num_workers - 1):
            replica = make_replica()
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
            self.replicas.append(replica)
        self.free: queue.SimpleQueue[Trained] = queue.SimpleQueue()
        for replica in self.replicas:
            self.free.put(replica)
        self.pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))

    def add_batch(self, batch: Tensor) -> float:
        """Adds the gradient of the mean loss of `batch`, ids of shape (rows, length + 1); returns that loss in nats."""
        length = batch.shape[1] - 1
        cos, sin = (table.to(self.device) for table in rotary_tables(self.model.shape, length))

        def add_part(part: Tensor) -> float:
            replica = self.free.get()
            with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
                loss = self.loss(replica, part.to(self.device), cos, sin) * (len(part) / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self.free.put(replica)
            return loss.item()

        parts = torch.split(batch, max(1, self.micro_tokens // length))
        losses = list(self.pool.map(add_part, parts))
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), self.model.parameters(), strict=True):
                if mine.grad is not None:
                    shared.grad = mine.grad if shared.grad is None else shared.grad.add_(mine.grad)
                    mine.grad = None
        return sum(losses)
