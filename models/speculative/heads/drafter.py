"""Drafts by an EAGLE-3 or MTP head, which continues from the model's own hidden states. Its keys and values have the
model's block numbers, so rows that share a prefix share the head's keys and values too."""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.models.backends.base import Backend
from penstock.models.batch.batch import Batch, FeatureLines
from penstock.models.batch.rows import Ids, Row, RowTable
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.draft_head import HeadCheckpoint
from penstock.models.checkpoint.eagle import check_eagle_head
from penstock.models.checkpoint.mtp import check_mtp_head
from penstock.models.speculative.draft_model import directory, with_kv_room
from penstock.models.speculative.drafter import Drafter, Proposal, Wanted
from penstock.models.speculative.heads.head import NO_DRAWS, DraftHead, Draws, HeadDraft, HeadResult, HeadStep
from penstock.scheduler.worker_config import DraftMethod, WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

LoadHead = Callable[[WorkerConfig, HeadCheckpoint, Backend], DraftHead]

HEADS = {
    "cpu": "penstock.models.speculative.heads.cpu",
    "cuda": "penstock.models.speculative.heads.cuda",
    "reference": "penstock.models.speculative.heads.reference",
}
"""The module with the ``load_head`` of each backend."""


def with_room(config: WorkerConfig) -> WorkerConfig:
    """Returns a config with room for the head's KV and with its feature layers. Raises ModelError."""
    head, dtype = _check(config)
    config = with_kv_room(config, dtype, head.spec)
    return msgspec.structs.replace(config, feature_layers=head.feature_layers)


def load(config: WorkerConfig, backend: Backend) -> "HeadDrafter":
    """Loads the drafter that the config names. Raises ModelError."""
    facts, (head, _) = backend.facts, _check(config)
    load_head: LoadHead = import_module(HEADS[facts.backend]).load_head
    logger.info(
        "drafts come from the head in %s, which reads hidden states before layers %s",
        head.info.path, ", ".join(map(str, head.feature_layers)),
    )  # fmt: skip
    return HeadDrafter(load_head(config, head, backend), head, facts)


def _check(config: WorkerConfig) -> tuple[HeadCheckpoint, str]:
    """Checks the head that the config names. Returns it and the model's dtype. Raises ModelError."""
    assert config.speculation is not None
    info = check_checkpoint(Path(config.model), weights=False)
    if config.speculation.method is DraftMethod.MTP:
        return check_mtp_head(info), info.dtype
    return check_eagle_head(directory(config), info.spec), info.dtype


@dataclass(slots=True, eq=False)
class _Stand:
    """The head's progress in a row. Position p of the head has the model's hidden states at p and token p + 1."""

    origin: int
    """The row's block at which the head begins. It does not see earlier blocks."""
    num_read: int
    """The head has keys and values of the positions before this one. They follow from the row's history."""
    first: int
    end: int
    """The position after the newest whose features are known."""
    features: list[FeatureLines]
    """The features of the positions from ``first`` on, (positions, feature layers * hidden) in parts: those that the
    head has not read, and always the newest, from which it drafts."""

    def append_features(self, part: FeatureLines) -> None:
        if len(part):
            self.features.append(part)
            self.end += len(part)

    def features_from(self, position: int) -> Iterator[FeatureLines]:
        """Yields the features of the positions from ``position`` on."""
        behind = position - self.first
        for part in self.features:
            if behind < len(part):
                yield part[behind:] if behind > 0 else part
            behind -= len(part)


class _HeadSpan(NamedTuple):
    """The part of a row that a step of the head computes."""

    row: Row
    stand: _Stand
    start: int
    token_ids: list[int]


class HeadDrafter(Drafter):
    """Proposes what the head chooses, one step of the head per token. Drawn tokens use the model's noise.

    The head reads a prompt while the model computes it. It has a cached prefix too if it read those blocks when the
    model computed them; otherwise it begins after them.
    """

    by_rounds = True

    def __init__(self, head: DraftHead, checkpoint: HeadCheckpoint, facts: WorkerFacts) -> None:
        self._head = head
        self.feature_layers = checkpoint.feature_layers
        self._block_size = facts.block_size
        self._lock = threading.Lock()
        """``read`` may run in another thread, while the other methods process the next plan."""
        self._stands: dict[Row, _Stand | None] = {}
        """The rows that it follows, with None for those of which it has read nothing yet."""
        self._origins = np.full(facts.num_blocks, -1, dtype=np.int64)
        """The row's block at which the head began, for each block that it has whole; -1 for others. Positions are
        counted from there, so only rows for which it began at the same block can share one."""

    def attach(self, table: RowTable) -> None:
        self._table = table

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._origins[list(block_ids)] = -1
            self._head.reset_blocks(block_ids)

    def follow(self, row: Row) -> None:
        with self._lock:
            self._stands[row] = None

    def leave(self, row: Row) -> None:
        with self._lock:
            self._stands.pop(row, None)

    drop_row = leave

    def is_ready(self, row: Row) -> bool:
        """Returns whether it has features of the row. If so, those of the newest position come with its token."""
        stand = self._stands.get(row)
        return stand is not None and len(stand.features) > 0

    def backlog(self, row: Row) -> int:
        stand = self._stands.get(row)
        return 0 if stand is None else max(0, stand.end - 1 - stand.num_read)

    def read(self, batch: Batch, features: FeatureLines) -> None:
        """Keeps the features of positions that are certain. Reads them whenever they fill a block, so few are kept."""
        with self._lock:
            self._read_along(batch, features)

    def _read_along(self, batch: Batch, features: FeatureLines) -> None:
        spans = []
        for row, start, end, first in zip(
            batch.rows, batch.starts.tolist(), batch.ends.tolist(), batch.token_starts.tolist(), strict=False
        ):
            if row not in self._stands:
                continue
            stand = self._stands[row]
            if stand is None:
                stand = self._stands[row] = self._begin(row, start)
            known = min(end, row.num_computed)  # wrong drafts come after it
            stand.append_features(features[first + stand.end - start : first + known - start].copy())
            if stand.end // self._block_size > stand.num_read // self._block_size:
                spans.append(self._unread(row, stand, stand.num_read))
        if spans:
            self._read(spans, drafts=False)

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Proposes ``max_drafts`` tokens per row, or none while it lacks the features of the row's newest position."""
        proposals = {row: Proposal([], []) for row, _ in wanted}
        most = dict(wanted)
        spans = []
        for row in proposals:
            stand = self._stands.get(row)
            if stand is not None and stand.features and stand.end == len(row.history) - 1:
                assert stand.end + most[row] - 1 <= row.num_blocks * self._block_size, "drafts have blocks"
                spans.append(self._unread(row, stand, min(stand.num_read, stand.end - 1)))
        if spans:
            with self._lock:
                step, result = self._read(spans, drafts=True)
                self._draft(step, result, [span.row for span in spans], proposals, most)
        return list(proposals.values())

    def _begin(self, row: Row, start: int) -> _Stand:
        """Returns where the head begins in a row whose features are known from ``start`` on."""
        blocks = self._table.blocks(row, 0)[: -(-start // self._block_size)]
        origin = int(self._origins[blocks[-1]]) if len(blocks) else 0
        if origin < 0 or (self._origins[blocks[origin:]] != origin).any():
            origin = len(blocks)
        begin = max(start, origin * self._block_size)
        return _Stand(origin, begin, begin, begin, [])

    def _unread(self, row: Row, stand: _Stand, start: int) -> _HeadSpan:
        return _HeadSpan(row, stand, start, row.history[start + 1 : stand.end + 1])

    def _read(self, spans: list[_HeadSpan], drafts: bool) -> tuple[HeadStep, HeadResult]:
        """Lets the head read known tokens and, if ``drafts``, draft one per row. Sorts the spans as the step's rows."""
        spans.sort(key=lambda span: (len(span.token_ids) > 1, -span.stand.end))
        counts = np.array([len(span.token_ids) for span in spans])
        starts = np.array([span.start - span.stand.origin * self._block_size for span in spans])
        blocks = [self._table.blocks(span.row, span.stand.origin) for span in spans]
        tables: Ids = np.zeros((len(spans), max(map(len, blocks))), dtype=np.int64)
        for line, ids in zip(tables, blocks, strict=True):
            line[: len(ids)] = ids
        step = HeadStep(
            token_ids=np.array([token_id for span in spans for token_id in span.token_ids]),
            starts=starts,
            ends=starts + counts,
            tables=tables,
            block_size=self._block_size,
            sampled=np.cumsum(counts) - 1 if drafts else np.empty(0, dtype=np.int64),
            draws=_draws([span.row for span in spans]) if drafts else NO_DRAWS,
            features=[part for span in spans for part in span.stand.features_from(span.start)],
        )
        result = self._head.run(step)
        for row, stand, start, _ in spans:
            begin, end = start // self._block_size, stand.end // self._block_size
            if end > begin:
                self._origins[self._table.blocks(row, begin)[: end - begin]] = stand.origin
            stand.num_read, stand.first, stand.features = stand.end, stand.end - 1, [stand.features[-1][-1:].copy()]
        return step, result

    def _draft(
        self, step: HeadStep, result: HeadResult, rows: list[Row], proposals: dict[Row, Proposal], most: dict[Row, int]
    ) -> None:
        """Continues from a step that drafted for each of its rows, until each row has its maximum number of drafts."""
        results = [(rows, result)]
        while going_on := [at for at, row in enumerate(rows) if len(results) < most[row]]:
            token_ids, hidden = result.token_ids, result.hidden
            if len(going_on) < len(rows):
                rows, token_ids, hidden = [rows[at] for at in going_on], token_ids[going_on], hidden[going_on]
            step = HeadStep(
                token_ids=token_ids,
                starts=step.ends[going_on],
                ends=step.ends[going_on] + 1,
                tables=step.tables[going_on],
                block_size=self._block_size,
                sampled=np.arange(len(rows)),
                draws=step.draws.after(going_on),
                hidden=hidden,
            )
            result = self._head.run(step)
            results.append((rows, result))
        for rows, result in results:
            for row, draft in zip(rows, result.drafts(), strict=True):
                proposals[row].token_ids.append(draft.token_id)
                proposals[row].confidences.append(_confidence(row.sampling.temperature, draft))


def _draws(rows: list[Row]) -> Draws:
    """Returns the draws of the tokens that follow the rows' histories."""
    return Draws(
        np.array([row.sampling.temperature for row in rows]),
        np.array([row.sampling.seed for row in rows], dtype=np.uint64),
        np.array([len(row.history) for row in rows]),
    )


def _confidence(temperature: float, draft: HeadDraft) -> float:
    """Returns the probability that the model chooses the draft too.

    At temperature 0 that is the head's probability. A drawn draft has the model's own noise: its odds times e^noise are
    the odds of a draw in which the noise of the other tokens is unknown. That noise was small, or the draft would not
    have won, so about the square of that probability is right in practice.
    """
    drawn = min(temperature, 1.0)
    odds = 1.0 / max(1e-30, draft.probability) - 1.0  # against it; max() also replaces a broken head's NaN
    return float((1.0 + odds * math.exp(-drawn * draft.noise)) ** -(1.0 + drawn))
