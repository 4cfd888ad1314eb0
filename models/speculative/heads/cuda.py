"""A draft head on the CUDA kernels. Small steps that choose drafts are CUDA graphs."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cuda.attention.common import PAGE_SLOTS, RaggedRows
from penstock.kernels.cuda.core.launch import launches
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.kernels.cuda.norm import rms_norm
from penstock.models.backends.base import Backend
from penstock.models.backends.cuda.attention import TritonAttention
from penstock.models.backends.cuda.backend import CudaBackend
from penstock.models.backends.cuda.linear import CudaLinears
from penstock.models.backends.cuda.model import CudaModel
from penstock.models.backends.cuda.shapes import shape_of
from penstock.models.backends.cuda.steps.features import DeviceFeatures, tensors
from penstock.models.backends.cuda.steps.graphs import VERIFYING_STEPS, StepGraphs, decoding_sizes
from penstock.models.backends.cuda.steps.step_io import ArrayLayout, Size
from penstock.models.backends.memory import allocated
from penstock.models.backends.tensor_parallel import ALONE
from penstock.models.backends.torch_common.device import copy_to
from penstock.models.backends.torch_common.weights import Mlp, RmsNorm, unchanged
from penstock.models.batch.rows import Ids
from penstock.models.checkpoint.draft_head import HeadCheckpoint
from penstock.models.speculative.heads.head import HeadDraft, HeadResult, HeadStep, ids_on_host
from penstock.models.speculative.heads.torch_common import DrawTensors, HeadWeights, draw_drafts, load_head_weights
from penstock.scheduler.worker_config import WorkerConfig

Made = tuple[Tensor, Tensor]
"""The states of the tokens after which a draft is chosen, (S, hidden) each: the one that the next step continues from,
and the same after the last norm."""


class HeadInputs:
    """The inputs of a step from the host: all but its tables in one copy, whose layout depends on the step's size."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        largest = _layout(Size(shape.max_sequences, shape.max_tokens, shape.max_sequences, 0))
        self._array = torch.zeros(largest.size, dtype=torch.int32, device=device)
        self._tables = torch.zeros(shape.max_sequences, shape.max_pages, dtype=torch.int32, device=device)
        self._rows = torch.arange(shape.max_sequences, dtype=torch.int32, device=device)
        self._vocab_size = shape.vocab_size

    def part(self, size: Size, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        """Returns an input of a step of that size."""
        return self._array[_layout(size).parts[name]].view(dtype)

    def rows(self, size: Size) -> RaggedRows:
        return RaggedRows(
            self._tables, self._rows[: size.sequences], self.part(size, "query_starts"), self.part(size, "contexts")
        )

    def draws(self, size: Size) -> DrawTensors:
        return DrawTensors(
            self.part(size, "temperatures", torch.float64),
            self.part(size, "seeds", torch.int64),
            self.part(size, "draft_positions", torch.int64),
        )

    def write(self, step: HeadStep, size: Size) -> None:
        """Writes the step, padded to that size with empty sequences, tokens and drafts."""
        layout, pinned, num_tokens = _layout(size), self._array.is_cuda, len(step.token_ids)
        chosen = step.token_ids.tensor if isinstance(step.token_ids, DeviceFeatures) else None
        known: Ids = ids_on_host(step.token_ids) if chosen is None else np.empty(0, dtype=np.int64)
        host = torch.zeros(layout.size, dtype=torch.int32, pin_memory=pinned)
        array = host.numpy()
        query_starts = np.full(size.sequences + 1, num_tokens)
        query_starts[: len(step.token_starts)] = step.token_starts
        slots = np.full(size.tokens, -1, dtype=np.int64)
        slots[:num_tokens] = step.slots
        temperatures, seeds, draft_positions = step.draws
        for name, values in (
            ("query_starts", query_starts.astype(np.int32)),
            ("contexts", step.ends.astype(np.int32)),
            # An id out of range must never become an address.
            ("token_ids", known.clip(0, self._vocab_size - 1).astype(np.int32)),
            ("positions", step.positions.astype(np.int32)),
            ("slots", slots),
            ("sampled", step.sampled),
            ("temperatures", temperatures),
            ("seeds", seeds),
            ("draft_positions", draft_positions),
        ):
            array[layout.parts[name]].view(values.dtype)[: len(values)] = values
        self._array[: layout.size].copy_(host, non_blocking=pinned)
        if chosen is not None:
            self.part(size, "token_ids")[:num_tokens].copy_(chosen)
        num_rows, width = step.tables.shape
        self._tables[:num_rows, :width] = copy_to(self._tables.device, step.tables.astype(np.int32))


@lru_cache(maxsize=1024)
def _layout(size: Size) -> ArrayLayout:
    sequences, tokens, sampled = size.sequences, size.tokens, size.sampled
    wide = dict.fromkeys(("sampled", "temperatures", "seeds", "draft_positions"), 2 * sampled)
    of_tokens = {"token_ids": tokens, "positions": tokens, "slots": 2 * tokens}
    return ArrayLayout({"query_starts": sequences + 1, "contexts": sequences, **of_tokens, **wide})


class HeadLayer(CudaModel):
    """The head as a model of one layer. An EAGLE-3 head computes queries, keys and values from an embedding and hidden
    states side by side; an MTP head computes the layer's input from both."""

    def __init__(self, head: HeadCheckpoint, weights: HeadWeights, pages: Tensor, shape: ModelShape) -> None:
        """``pages`` is (1, pages, 2, K, 16, D)."""
        linears = CudaLinears(head.info, None, pages.device, deterministic=False)
        attention = TritonAttention(shape, pages.device)
        super().__init__(head.spec, weights.common, list(pages), shape, ALONE, linears, attention)
        self._fc, self._embedding_norm, self._hidden_norm = weights.fc, weights.embedding_norm, weights.hidden_norm
        self._continues_after_norm = head.spec.continues_after_norm

    def continue_from(self, x: Tensor, inputs: HeadInputs, size: Size) -> Made:
        """Continues from (T, hidden), which is not modified. Writes the keys and values of every token that has a slot,
        and does no more if no draft is to be chosen."""
        [layer], spec, hidden = self._weights.layers, self._spec, self._spec.hidden_size
        embeddings = functional.embedding(inputs.part(size, "token_ids"), self._weights.embedding)
        before = x.new_empty(len(x), 2 * hidden)
        for source, norm, half in (
            (embeddings, self._embedding_norm or layer.before_attention, before[:, :hidden]),
            (x, self._hidden_norm, before[:, hidden:]),
        ):
            assert isinstance(norm, RmsNorm)
            rms_norm(source, norm.weight, spec.norm_eps, half)
        if self._embedding_norm is not None:
            x = self._fc(before)
            before = self._normed(x, None, None, layer.before_attention)
        query = x.new_empty(len(x), spec.num_heads, spec.head_dim)
        slots = inputs.part(size, "slots", torch.int64)
        gate = self._write_kv(0, layer, before, inputs.part(size, "positions"), slots, query)
        if not size.sampled:
            return x[:0], x[:0]
        rows, mixed = inputs.rows(size), torch.zeros_like(query)
        attend = self._attention.plan(rows, size.longest)
        attend(None, query, self._kv[0], mixed, None)
        sampled = inputs.part(size, "sampled", torch.int64)
        mixed = mixed.flatten(1) if gate is None else mixed.flatten(1) * torch.sigmoid(gate)
        has_experts = not isinstance(layer.mlp, Mlp)  # their kernels need the tokens of whole sequences
        if not has_experts:
            x, mixed = x.index_select(0, sampled), mixed.index_select(0, sampled)
        y = self._normed(x, layer.output(mixed), layer.after_attention, layer.before_mlp)
        y = self._normed(x, self._mlp(layer.mlp, y, rows.query_starts), layer.after_mlp, self._weights.norm)
        if self._continues_after_norm:
            x = y
        return (x.index_select(0, sampled), y.index_select(0, sampled)) if has_experts else (x, y)


class CudaHead:
    """A ``DraftHead``. Its features and hidden states are ``DeviceFeatures``."""

    def __init__(self, head: HeadCheckpoint, weights: HeadWeights, pages: Tensor, shape: ModelShape) -> None:
        self._layer = HeadLayer(head, weights, pages, shape)
        self._fc = weights.fc if weights.embedding_norm is None else unchanged
        """Maps features to what the layer continues from. An MTP head continues from its features."""
        self._target_ids = weights.target_ids
        self._device = device = pages.device
        self._inputs = HeadInputs(shape, device)
        # The inputs of the graphs.
        widths, dtype = (head.spec.feature_columns, head.spec.hidden_size), weights.common.embedding.dtype
        self._features, self._hidden = (
            torch.zeros(max(VERIFYING_STEPS[-1], shape.max_sequences), width, dtype=dtype, device=device)
            for width in widths
        )
        self._drafts_on_device = torch.zeros(3, shape.max_sequences, dtype=torch.float64, device=device)
        """Token ids, probabilities and noise, in a type that holds each of them without loss."""
        self._first = StepGraphs(lambda size: self._first_layers(size, self._features), self._choose, device)
        self._next = StepGraphs(lambda size: self._next_layers(size, self._hidden), self._choose, device)
        self._warm(shape)

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        """Does nothing: only the tokens of rows are ever read."""

    @torch.inference_mode()
    def run(self, step: HeadStep) -> HeadResult:
        """Computes a step, writing the KV of every token, after everything that was launched before."""
        num_tokens, num_drafts = len(step.token_ids), len(step.sampled)
        size = Size(len(step.ends), num_tokens, num_drafts, int((step.ends - step.starts).max()))
        # The thread may not be the one that loaded the model.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            graphs, layers, kept = self._first, self._first_layers, self._features
            if step.features is None:
                graphs, layers, kept = self._next, self._next_layers, self._hidden
            graph = graphs.find(size) if num_drafts else None
            self._inputs.write(step, graph or size)
            given = tensors([step.hidden] if step.features is None else step.features)
            if graph is None:
                made = layers(size, torch.cat(given))
                self._choose(size, made)
            else:
                torch.cat(given, out=kept[:num_tokens])
                made = graphs.run(graph, lambda: None)
            if not num_drafts:
                return HeadResult(list, DeviceFeatures.of(self._drafts_on_device[0, :0]), DeviceFeatures.of(made[0]))
            # Copies, since the next step overwrites both.
            hidden, drafts = made[0][:num_drafts].clone(), self._drafts_on_device[:, :num_drafts].clone()

        def read() -> list[HeadDraft]:
            return [HeadDraft(int(token_id), *rest) for token_id, *rest in drafts.T.tolist()]

        return HeadResult(read, DeviceFeatures.of(drafts[0]), DeviceFeatures.of(hidden))

    def _first_layers(self, size: Size, given: Tensor) -> Made:
        return self._layer.continue_from(self._fc(given[: size.tokens]), self._inputs, size)

    def _next_layers(self, size: Size, given: Tensor) -> Made:
        return self._layer.continue_from(given[: size.tokens], self._inputs, size)

    def _choose(self, size: Size, made: Made) -> None:
        if size.sampled:
            drawn = draw_drafts(self._layer.logits(made[1]), self._target_ids, *self._inputs.draws(size))
            for line, found in zip(self._drafts_on_device, drawn, strict=True):
                line[: size.sampled].copy_(found)

    @torch.inference_mode()
    def _warm(self, shape: ModelShape) -> None:
        """Runs steps without sequences in every form, which compiles all kernels, and captures the graphs."""
        most, verified = shape.max_sequences, shape.max_queries[-1]
        decoding = decoding_sizes(most)
        reading = [Size(min(most, number), number, min(most, number), number) for number in (1, *VERIFYING_STEPS)]
        if self._device.type != "cuda":  # a few, which show that padding does no harm
            decoding, reading = decoding[:2], [size for size in reading if size.tokens in (1, 8)]
        with launches.warming():
            sizes = [Size(1, number, 1, number) for number in sorted({1, verified, verified + 1})]
            if self._device.type == "cuda":  # also allocates the memory that the largest step needs
                sizes.append(Size(most, shape.max_tokens, most, shape.max_tokens))
            for size in sizes:
                features = self._features.new_zeros(size.tokens, self._features.shape[1])
                self._choose(size, self._first_layers(size, features))
            self._first.capture(size for size in reading if size.tokens <= shape.max_tokens)
            self._next.capture(decoding)


def load_head(config: WorkerConfig, head: HeadCheckpoint, backend: Backend) -> CudaHead:
    """Loads the head for a model on the CUDA backend. Raises ModelError."""
    assert isinstance(backend, CudaBackend), "a head runs on its model's backend"
    assert config.speculation is not None
    spec, facts, embedding = head.spec, backend.facts, backend.embedding
    weights = load_head_weights(config, head, facts.dtype, embedding, backend.head, backend.num_logits)
    # The tokens of a step, and those of an unfinished block that each row has not read yet.
    max_tokens = facts.max_num_batched_tokens + facts.max_num_seqs * PAGE_SLOTS
    shape = shape_of(
        spec,
        embedding.dtype,
        embedding.dtype,
        len(weights.target_ids),
        facts.max_model_len,
        facts.max_num_seqs,
        max_tokens,
        deterministic=False,
        max_drafts=config.speculation.num_speculative_tokens,
    )
    size = (1, facts.num_blocks, 2, spec.num_kv_heads, PAGE_SLOTS, spec.head_dim)
    with allocated(facts.num_blocks, embedding.device):
        pages = torch.empty(size, dtype=embedding.dtype, device=embedding.device)
    return CudaHead(head, weights, pages, shape)
