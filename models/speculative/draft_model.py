"""Drafts by a small model with the same tokenizer. It runs on a backend of its own, whose pages go by the same block
numbers as the large model's, so that whoever shares a prefix shares the small model's keys and values too."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.models.backends.base import Backend, load_backend
from penstock.models.batch.batch import Batch
from penstock.models.batch.rows import Row, RowTable
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.speculative.drafter import Drafter, Proposal, Wanted
from penstock.scheduler.plan import DraftMethod, SpeculationConfig, WorkerConfig

logger = logging.getLogger(__name__)

CATCHING_UP = SpeculationConfig(DraftMethod.DRAFT_MODEL, num_speculative_tokens=1)
"""Of the draft model itself, which has no drafts: where all of its own were right it has yet to read the last of them,
and the large model's token, so that steps of two tokens a row are as frequent as if one were drafted."""
CONFIDENCE = 0.6
"""In a draft, before anything came of some: that of a model whose choices are the large one's more often than not."""
WIDE = {"float32": 4, "float64": 8}
"""Bytes of an element, of dtypes that have more than two."""


def with_room(config: WorkerConfig) -> WorkerConfig:
    """The same config, of a worker that leaves room for the keys and values of its draft model too. Raises
    ModelError."""
    info = check_checkpoint(_directory(config), weights=False)
    dtype = info.dtype if config.dtype == "auto" else config.dtype
    num_bytes = info.spec.kv_bytes_per_token(WIDE.get(dtype, 2)) * config.block_size
    return msgspec.structs.replace(config, block_bytes_beside=num_bytes)


def load(config: WorkerConfig, backend: Backend) -> "DraftModelDrafter":
    """The factory of the registry of drafters. Raises ModelError."""
    facts, model = backend.facts, _directory(config)
    spec = check_checkpoint(model, weights=False).spec
    num_tokens = min(config.tokenizer_vocab_size or facts.vocab_size, facts.vocab_size)
    if spec.vocab_size < num_tokens:
        raise ModelError(
            f"--speculative-config: model: {model} knows {spec.vocab_size} tokens, and the large one {num_tokens}: "
            "give one with the same tokenizer"
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
            speculation=CATCHING_UP,
            tokenizer=None,
        )
    )
    logger.info("drafts come from %s, whose weights are %d MiB", model, drafts.facts.weight_bytes >> 20)
    return DraftModelDrafter(drafts)


def _directory(config: WorkerConfig) -> Path:
    assert config.speculation is not None
    assert config.speculation.model is not None, "the service wants one"
    return Path(config.speculation.model)


@dataclass(slots=True, eq=False)
class _Draft:
    """How far the draft model is with a row. Its keys and values of ``[0, num_computed)`` follow from the row's history
    and then from ``drafted``."""

    row: Row
    """What the draft model's backend takes for the row; another one whenever it has to go back."""
    num_known: int
    """Tokens of the history when it was drafted."""
    drafted: list[int]
    num_computed: int


class _DraftSpan(NamedTuple):
    """What a step of the draft model computes of a row."""

    draft: _Draft
    end: int
    """From where the draft model stands to here."""
    most: int
    """Drafts that are wanted; 0: none yet."""


class DraftModelDrafter(Drafter):
    """A ``Drafter``: what the draft model chooses, by the same noise where tokens are drawn, so that the two models'
    choices differ only where their distributions do."""

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
        """Of each block: whether its page has been written whole, with tokens that are certain, since it was given to
        somebody."""

    def attach(self, table: RowTable) -> None:
        """All rows, whose blocks are the draft model's too."""
        self._table = table

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        """Whatever the draft model had there is lost."""
        self._is_whole[list(block_ids)] = False
        self._backend.reset_blocks(list(block_ids))

    def backlog(self, row: Row) -> int:
        """Tokens that the draft model would read of it, besides the newest; but for what it finds in the cache."""
        draft = self._drafts.get(row)
        return max(0, min(self._max_tokens, len(row.history) - (0 if draft is None else draft.num_computed)) - 1)

    def drop_row(self, row: Row) -> None:
        """The row is dropped."""
        draft = self._drafts.pop(row, None)
        if draft is not None:
            draft.row.is_dropped = True

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """For each row up to ``max_drafts`` tokens; none while the draft model has not read the row's history yet."""
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
        """Where the draft model can go on with a row."""
        draft = self._drafts.get(row)
        if draft is None:
            # Blocks of a prefix that others had are as they left them.
            blocks = table.blocks(row, 0)[: (len(row.history) - 1) // self._block_size]
            behind = np.flatnonzero(~self._is_whole[blocks])
            num_computed = int(behind[0] if len(behind) else len(blocks)) * self._block_size
        else:
            came = row.history[draft.num_known :]
            num_right = next((i for i, (a, b) in enumerate(zip(draft.drafted, came, strict=False)) if a != b), None)
            if num_right is None:
                num_right = min(len(draft.drafted), len(came))
            num_computed = min(draft.num_computed, draft.num_known + num_right, len(row.history) - 1)
            # What penalties count is counted anew: the backend's own counts are of what it chose itself.
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
        """Computes these, and has the next token chosen of each that has all its history computed."""
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
