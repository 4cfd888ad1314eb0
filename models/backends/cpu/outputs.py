"""What a step of the library reads and returns beside its layers: tokens, log-probabilities, vectors and features."""

import ctypes

import numpy as np

from penstock.kernels.cpu.bindings import SampledToken, address
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.batch.batch import Batch, BatchResult, Sampled
from penstock.models.batch.pooled_row import PooledRow
from penstock.models.batch.rows import Ids, Row
from penstock.scheduler.plan import PromptLogprobsPart, TokenLogprobs


def batch_fields(batch: Batch, tables: Ids) -> dict[str, int]:
    """Returns the fields of a step that describe its tokens. ``tables`` are the batch's, contiguous."""
    return {
        "num_tokens": len(batch.token_ids), "num_rows": len(batch.rows), "token_ids": address(batch.token_ids),
        "starts": address(batch.starts), "ends": address(batch.ends), "token_starts": address(batch.token_starts),
        "tables": address(tables), "table_stride": tables.shape[1],
    }  # fmt: skip


class BatchOutputs:
    """The outputs that a batch requests besides the KV of its tokens. ``fields`` are fields of the step; what they
    point to lives as long as this object."""

    def __init__(self, batch: Batch, sampling_rows: SamplingRows, num_logits: int) -> None:
        self._batch = batch
        self._num_logits = num_logits
        self._sampling = sampling = sampling_rows.gather(batch.sampled)
        self._sampled = sampled = batch.sampled_tokens
        self._tokens = (SampledToken * len(sampled))()
        room = sampling.num_top
        self._top_ids = np.empty((len(sampled), room), dtype=np.int32)
        self._tops = np.empty((len(sampled), room), dtype=np.float32)
        spans, pooled_spans = list(batch.prompt_spans()), list(batch.pooled_spans())
        self._scores = _Scores(spans, num_logits) if spans else None
        self._pooled = _Pooled(pooled_spans) if pooled_spans else None
        self.fields = {
            "num_sampled": len(sampled), "sampled": address(sampled), "sampling": sampling.address,
            "tokens": ctypes.addressof(self._tokens), "room": room, "top_ids": address(self._top_ids),
            "tops": address(self._tops),
            **(self._scores.fields if self._scores else {}),
            **(self._pooled.fields if self._pooled else {}),
        }  # fmt: skip

    def wanted_tokens(self) -> Ids:
        """Returns the indices in the batch of the tokens whose hidden states are wanted, in the library's order."""
        parts = [self._sampled]
        if self._scores is not None:
            parts.append(self._scores.tokens)
        if self._pooled is not None:
            parts.append(self._pooled.tokens)
        return np.concatenate(parts)

    def apply_masks(self) -> None:
        """Waits for the masks of grammars and applies them to the sampling parameters."""
        batch = self._batch
        assert batch.masks is not None
        self._masks = batch.masks.words.result()
        assert 32 * self._masks.shape[1] >= self._num_logits, "a mask has a bit for every token"
        self._sampling.mask(batch.masks.sampled, self._masks)

    def result(self, features: "Features | None" = None) -> BatchResult:
        """Returns the results, once the library has written them."""
        sampled = []
        for index, (sample, token) in enumerate(zip(self._batch.sampled, self._tokens, strict=True)):
            logprobs = None
            if sample.row.sampling.logprobs is not None:
                top = token.num_top
                logprobs = TokenLogprobs(
                    top, [token.logprob], self._top_ids[index, :top].tolist(), self._tops[index, :top].tolist()
                )
            sampled.append(Sampled(token.token_id, logprobs))
        return BatchResult(sampled, self._scores.parts() if self._scores else [], features.array if features else None)


class _Scores:
    """The log-probabilities of prompt tokens that a batch computes: the library's inputs and outputs."""

    def __init__(self, spans: list[tuple[Row, int, int, int]], num_logits: int) -> None:
        self._spans = spans
        parts = [np.arange(first, first + count) for _, first, count, _ in spans]
        prompts = [row.history[position : position + count] for row, _, count, position in spans]
        for part in prompts:
            assert max(part) < num_logits, "prompts' ids are checked against the tokenizer's vocabulary"
        self._tops = tops = [min(row.sampling.prompt_logprobs or 0, num_logits) for row, _, _, _ in spans]
        tokens: Ids = np.concatenate(parts)
        targets: Ids = np.array([token for part in prompts for token in part], dtype=np.int64)
        num_tops: Ids = np.repeat(np.array(tops, dtype=np.int64), [len(part) for part in prompts])
        room = max(tops)
        self._chosen = np.empty(len(tokens), dtype=np.float32)
        self._top_ids = np.empty((len(tokens), room), dtype=np.int32)
        self._log_probabilities = np.empty((len(tokens), room), dtype=np.float32)
        self.tokens = tokens
        self._kept = (targets, num_tops)
        self.fields = {
            "num_scored": len(tokens), "scored": address(tokens), "targets": address(targets),
            "num_tops": address(num_tops), "scored_room": room, "chosen": address(self._chosen),
            "scored_top_ids": address(self._top_ids), "scored_tops": address(self._log_probabilities),
        }  # fmt: skip
        """Fields of the step. What they point to lives as long as this object."""

    def parts(self) -> list[PromptLogprobsPart]:
        parts = []
        begin = 0
        for (row, _, count, position), top in zip(self._spans, self._tops, strict=True):
            end = begin + count
            logprobs = TokenLogprobs(
                top,
                self._chosen[begin:end].tolist(),
                self._top_ids[begin:end, :top].ravel().tolist(),
                self._log_probabilities[begin:end, :top].ravel().tolist(),
            )
            parts.append(PromptLogprobsPart(row.number, row.epoch, position, logprobs))
            begin = end
        return parts


class _Pooled:
    """The tokens of a batch whose hidden states are added to vectors, and the vectors' addresses."""

    def __init__(self, spans: list[tuple[PooledRow, int, int]]) -> None:
        parts = [np.arange(first, first + count) for _, first, count in spans]
        tokens: Ids = np.concatenate(parts)
        starts: Ids = np.cumsum([0, *(count for _, _, count in spans)], dtype=np.int64)
        # Addresses; the rows own what they point to.
        vectors: Ids = np.array([address(row.total) for row, _, _ in spans], dtype=np.int64)
        self.tokens = tokens
        self._kept = (starts, vectors)
        self.fields = {
            "num_vectors": len(vectors), "num_pooled": len(tokens), "pooled": address(tokens),
            "pooled_starts": address(starts), "vectors": address(vectors),
        }  # fmt: skip


class Features:
    """The output buffer for a batch's hidden states before its feature layers."""

    def __init__(self, batch: Batch, hidden_size: int) -> None:
        layers = np.array(batch.feature_layers, dtype=np.int32)
        self.array = np.empty((len(batch.token_ids), len(layers) * hidden_size), dtype=np.float32)
        self._kept = layers
        self.fields = {
            "num_features": len(layers), "feature_layers": address(layers), "features": address(self.array),
        }  # fmt: skip
