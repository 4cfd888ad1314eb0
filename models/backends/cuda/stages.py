"""A stage's layers on a GPU. Rows and tokens are the host's, which each batch brings; rank 0 samples in plain torch. A
batch is launched kernel by kernel, and the host waits for its hidden states, since it sends them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cuda.attention.common import RaggedRows
from penstock.kernels.cuda.core.launch import launches
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.kernels.reference.upcast import upcast
from penstock.models.backends.cuda.linear import CHANGES
from penstock.models.backends.cuda.model import CudaModel
from penstock.models.backends.cuda.places import TokenPlaces
from penstock.models.backends.stage_part import StageRows
from penstock.models.backends.torch_common.device import copy_to
from penstock.models.batch.batch import Batch
from penstock.scheduler.worker_config import WorkerFacts


class CudaStage:
    """A ``StageDecoder`` on the CUDA kernels."""

    def __init__(self, model: CudaModel, shape: ModelShape, facts: WorkerFacts, *, has_ends: bool) -> None:
        """Runs steps without sequences in every form that occurs, which compiles all kernels."""
        self.facts = facts
        self._model = model
        self._shape = shape
        self._device = model.device
        self._warm(has_ends)

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Does nothing: only the tokens of rows are ever read."""

    def embed(self, batch: Batch) -> Tensor:
        # Ids were checked at admission, but an id out of range must never become an address.
        token_ids = copy_to(self._device, batch.token_ids.clip(0, self._shape.vocab_size - 1))
        return self._model.embed(token_ids, copy_to(self._device, batch.positions))

    def run_layers(self, rows: Batch | StageRows, x: Tensor) -> Tensor:
        num_rows, width = rows.tables.shape
        width = min(width, self._shape.max_pages)
        tables: NDArray[np.int32] = np.full((num_rows, self._shape.max_pages), -1, dtype=np.int32)
        tables[:, :width] = rows.tables[:, :width]
        query_starts = copy_to(self._device, rows.token_starts.astype(np.int32))
        ragged = RaggedRows(
            copy_to(self._device, tables),
            copy_to(self._device, np.arange(num_rows, dtype=np.int32)),
            query_starts,
            copy_to(self._device, rows.ends.astype(np.int32)),
        )
        places = TokenPlaces(
            copy_to(self._device, rows.positions.astype(np.int32)), copy_to(self._device, rows.slots), query_starts
        )
        self._model.run_layers(x, places, ragged, int((rows.ends - rows.starts).max()))
        return x

    def final_norm(self, x: Tensor) -> Tensor:
        return self._model.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        # A copy, since a part of the hidden states may start at an address that kernels cannot read from.
        return upcast(self._model.logits(hidden.clone()))

    @torch.inference_mode()
    def _warm(self, has_ends: bool) -> None:
        with launches.warming():
            self._model.measure_products(self._shape.max_tokens)
            for tokens in self._warm_sizes():
                x = self._zeros(tokens, self.facts.hidden_size, dtype=self._model.embedding.dtype)
                starts = self._zeros(2, dtype=torch.int32)
                tables = self._zeros(1, self._shape.max_pages, dtype=torch.int32) - 1
                one = self._zeros(1, dtype=torch.int32)
                slots = self._zeros(tokens, dtype=torch.int64) - 1
                places = TokenPlaces(self._zeros(tokens, dtype=torch.int32), slots, starts)
                self._model.run_layers(x, places, RaggedRows(tables, one, starts, one), tokens)
                if has_ends:
                    self._model.logits(self._model.final_norm(x[: self._shape.max_sampled].clone()))

    def _warm_sizes(self) -> list[int]:
        """Returns numbers of tokens that differ in what they launch."""
        most, verified = self._shape.max_tokens, self._shape.max_queries[-1]
        # All ranks of a stage must run the same steps, though only rank 0 has the head, whose kernels may be others.
        wanted = {1, 2, verified + 1, *CHANGES, *self._model.changes()}
        if self._device.type == "cuda":
            wanted.add(most)  # which also allocates the memory of the largest step
        return sorted(number for number in wanted if number <= most)

    def _zeros(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)
