"""Drafts by a small model with the same tokenizer. It runs on its own backend, whose pages have the large model's block
numbers, so rows that share a prefix share the small model's keys and values too."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import Backend, load_backend
from penstock.models.batch.batch import Batch
from penstock.models.batch.rows import Row, RowTable
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.speculative.drafter import Drafter, Proposal, Wanted
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig, WorkerConfig

logger = logging.getLogger(__name__)

CATCHING_UP = SpeculationConfig(DraftMethod.DRAFT_MODEL, num_speculative_tokens=1)
"""The config of the draft model itself, which has no drafts. If all its own drafts were right, it has yet to read the
last one and the large model's token. So steps of two tokens per row are as frequent as if it verified one draft."""
CONFIDENCE = 0.6
"""The confidence in a draft, until results correct it: a draft model agrees with the large one more often than not."""
WIDE = {"float32": 4, "float64": 8}
"""The bytes per element of the dtypes that have more than two."""


def with_room(config: WorkerConfig) -> WorkerConfig:
    """Returns the config of a worker that leaves room for its draft model's keys and values. Raises ModelError."""
    info = check_checkpoint(directory(config), weights=False)
    return with_kv_room(config, info.dtype, info.spec)


def with_kv_room(config: WorkerConfig, dtype: str, spec: ModelSpec) -> WorkerConfig:
    """Returns a config with room for the KV of another model, in ``dtype`` unless the config names one."""
    dtype = dtype if config.dtype == "auto" else config.dtype
    num_bytes = spec.kv_bytes_per_token(WIDE.get(dtype, 2)) * config.block_size
    return msgspec.structs.replace(config, block_bytes_beside=num_bytes)


def load(config: WorkerConfig, backend: Backend) -> "DraftModelDrafter":
    """Loads the drafter that the config names. Raises ModelError."""
    facts, model = backend.facts, directory(config)
    spec = check_checkpoint(model, weights=False).spec
    if spec.has_state:
        raise ModelError(
            f"--speculative-config: model: {model} has recurrent layers, whose states are not kept for drafts: choose "
            "another model or another method"
        )
    num_tokens = min(config.tokenizer_vocab_size or facts.vocab_size, facts.vocab_size)
    if spec.vocab_size < num_tokens:
        raise ModelError(
            f"--speculative-config: model: {model} has {spec.vocab_size} tokens, and the large model {num_tokens}: "
            "choose one with the same tokenizer"
        )
    drafts = load_backend(
        msgspec.structs.replace(
            config,
            model=str(model),
            num_blocks=facts.num_blocks,
            block_bytes_beside=0,
            max_model_len=min(facts.max_model_len, spec.max_positions),
            tokenizer_vocab_size=num_tokens,
            quantization="none",
            host_kv_cache_bytes=0,
            max_loras=0,
            speculation=CATCHING_UP,
            tokenizer=None,
            # Rank 0 has all of it.
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            stage_layers=(),
        )
    )
    logger.info("drafts come from %s, which has weights of %d MiB", model, drafts.facts.weight_bytes >> 20)
    return DraftModelDrafter(drafts)


def directory(config: WorkerConfig) -> Path:
    """Returns the directory of the model that drafts."""
    assert config.speculation is not None
    assert config.speculation.model is not None, "the service requires one"
    return Path(config.speculation.model)


@dataclass(slots=True, eq=False)
class _Draft:
    """The draft model's progress in a row. Its keys and values of ``[0, num_computed)`` follow from the row's history,
    and then from ``drafted``."""

    row: Row
    """The row as the draft model's backend sees it. It is replaced whenever the draft model has to go back."""
    num_known: int
    """The length of the history when it was drafted."""
    drafted: list[int]
    num_computed: int


class _DraftSpan(NamedTuple):
    """The part of a row that a step of the draft model computes."""

    draft: _Draft
    end: int
    """The position after the last token. The first one is at ``draft.num_computed``."""
    most: int
    """The number of drafts to propose; 0 while part of the history is unread."""


class DraftModelDrafter(Drafter):
    """Proposes what the draft model chooses. Drawn tokens use the large model's noise, so the two models' choices
    differ only where their distributions do."""

    by_rounds = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._table: RowTable | None = None
        facts = backend.facts
        self._block_size = facts.block_size
        self._max_len = facts.max_model_len
        self._max_tokens = facts.max_num_batched_tokens
        self._drafts: dict[Row, _Draft] = {}
        self._is_whole = np.zeros(facts.num_blocks, dtype=bool)
        """Whether each block's whole page has been written, with tokens that are certain, since it was allocated."""

    def attach(self, table: RowTable) -> None:
        self._table = table

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        self._is_whole[list(block_ids)] = False
        self._backend.reset_blocks(list(block_ids))

    def backlog(self, row: Row) -> int:
        """Returns how many tokens the draft model has to read besides the newest. Cache hits are not subtracted."""
        draft = self._drafts.get(row)
        return max(0, min(self._max_tokens, len(row.history) - (0 if draft is None else draft.num_computed)) - 1)

    def drop_row(self, row: Row) -> None:
        draft = self._drafts.pop(row, None)
        if draft is not None:
            draft.row.is_dropped = True

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Proposes up to ``max_drafts`` tokens per row, or none until the draft model has read the row's history."""
        table = self._table
        assert table is not None
        drafts = [self._stand(table, row) for row, _ in wanted]
        room = self._max_tokens
        spans: list[_DraftSpan] = []
        for draft, (_, most) in zip(drafts, wanted, strict=True):
            num_tokens = min(draft.num_known - draft.num_computed, room)
            room -= num_tokens
            most = min(most, self._max_len - draft.num_known)
            if num_tokens and most > 0:
                end = draft.num_computed + num_tokens
                spans.append(_DraftSpan(draft, end, most if end == draft.num_known else 0))
        while spans:
            self._run(table, spans)
            spans = [_DraftSpan(draft, end + 1, most) for draft, end, most in spans if len(draft.drafted) < most]
        return [Proposal(draft.drafted.copy(), [CONFIDENCE] * len(draft.drafted)) for draft in drafts]

    def _stand(self, table: RowTable, row: Row) -> _Draft:
        """Returns the state from which the draft model can continue a row."""
        draft = self._drafts.get(row)
        if draft is None:
            # Blocks of a shared prefix still hold what other rows wrote there.
            blocks = table.blocks(row, 0)[: (len(row.history) - 1) // self._block_size]
            behind = np.flatnonzero(~self._is_whole[blocks])
            num_computed = int(behind[0] if len(behind) else len(blocks)) * self._block_size
        else:
            came = row.history[draft.num_known :]
            num_right = next((i for i, (a, b) in enumerate(zip(draft.drafted, came, strict=False)) if a != b), None)
            if num_right is None:
                num_right = min(len(draft.drafted), len(came))
            num_computed = min(draft.num_computed, draft.num_known + num_right, len(row.history) - 1)
            # Tokens for penalties are counted again: the backend counted those that it chose itself.
            if num_computed == draft.num_computed and row.counts is None:
                draft.num_known, draft.drafted, draft.row.num_blocks = len(row.history), [], row.num_blocks
                return draft
            draft.row.is_dropped = True
        own = replace(
            row,
            num_computed=num_computed,
            sampling=msgspec.structs.replace(row.sampling, logprobs=None, prompt_logprobs=None),
            is_dropped=False,
        )
        self._drafts[row] = _Draft(own, len(row.history), [], num_computed)
        return self._drafts[row]

    def _run(self, table: RowTable, spans: list[_DraftSpan]) -> None:
        """Computes the spans, and drafts the next token of each row whose whole history is computed."""
        spans.sort(key=lambda span: (span.end - span.draft.num_computed > 1, -span.end))
        drafts = [span.draft for span in spans]
        starts, ends = [draft.num_computed for draft in drafts], [span.end for span in spans]
        token_ids: list[int] = []
        for draft, start, end in zip(drafts, starts, ends, strict=True):
            known = draft.num_known
            token_ids += draft.row.history[start : min(end, known)]
            token_ids += draft.drafted[max(start - known, 0) : max(end - known, 0)]
        sampling = [span.draft for span in spans if span.most]
        result = self._backend.start_step(
            Batch(
                rows=[draft.row for draft in drafts],
                starts=np.array(starts, dtype=np.int64),
                ends=np.array(ends, dtype=np.int64),
                token_starts=np.cumsum([0, *(end - start for start, end in zip(starts, ends, strict=True))]),
                token_ids=np.array(token_ids, dtype=np.int64),
                table=table,
                sampled=[SampledPosition(draft.row, draft.drafted.copy()) for draft in sampling],
                num_sampled=[int(span.most > 0) for span in spans],
            )
        )()
        for draft, start, end in zip(drafts, starts, ends, strict=True):
            draft.num_computed = end
            begin, certain = start // self._block_size, min(end, draft.num_known) // self._block_size
            if certain > begin:
                self._is_whole[table.blocks(draft.row, begin)[: certain - begin]] = True
        for draft, sampled in zip(sampling, result.sampled, strict=True):
            draft.drafted.append(sampled.token_id)
