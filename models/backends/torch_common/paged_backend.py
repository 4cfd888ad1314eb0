"""What backends on ``KVPages`` share."""

from abc import abstractmethod

import torch
from torch import Tensor

from penstock.models.backends.base import SynchronousBackend
from penstock.models.backends.torch_common.host_pages import HostPages
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.backends.torch_common.outputs import result_of
from penstock.models.batch.batch import Batch, BatchResult


class PagedBackend(SynchronousBackend):
    """A ``Backend`` of torch operations on gathered pages."""

    def __init__(self, pages: KVPages, host_pages: HostPages, vocab_size: int) -> None:
        self._pages = pages
        self._host_pages = host_pages
        self._vocab_size = vocab_size
        self._device = pages.device

    @abstractmethod
    def forward(self, batch: Batch, features: list[Tensor]) -> Tensor:
        """Runs the layers, which write the KV of every token. Returns (T, hidden) after the last norm. Appends the
        inputs (T, hidden) of the batch's feature layers to ``features``; for the number of layers, what it returns."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """(N, hidden) -> (N, tokenizer's vocabulary), in at least fp32."""

    def reset_blocks(self, block_ids: list[int]) -> None:
        if block_ids:
            self._pages.reset_blocks(block_ids)

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        self._host_pages.copy_out(copies)

    def copy_in(self, copies: list[tuple[int, int]]) -> None:
        self._host_pages.copy_in(copies)

    def prefault(self) -> None:
        """Does nothing: torch's allocator manages memory."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        features: list[Tensor] = []
        hidden = self.forward(batch, features)
        result = result_of(batch, hidden, self.logits, self._vocab_size)
        return result._replace(features=torch.cat(features, 1).float().cpu().numpy()) if features else result
