"""Drafts by an EAGLE-3 head, which goes on from the model's own hidden states. Its keys and values go by the same block
numbers as the model's, so that whoever shares a prefix shares the head's keys and values too."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.models.backend import Backend
from penstock.models.batch import Batch
from penstock.models.checkpoint import check_checkpoint
from penstock.models.draft_head import DraftHead, Floats, HeadResult, HeadStep
from penstock.models.draft_model import WIDE
from penstock.models.drafting import Drafter, Proposal, Wanted
from penstock.models.eagle_checkpoint import HeadCheckpoint, check_head
from penstock.models.errors import ModelError
from penstock.models.rows import Ids, Row, RowTable
from penstock.scheduler.plan import WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

LoadHead = Callable[[WorkerConfig, HeadCheckpoint, Backend], DraftHead]

HEADS = {"cpu": "penstock.models.cpu_head", "reference": "penstock.models.reference_head"}
"""By the name of the model's backend: where its ``load_head`` is."""


def with_room(config: WorkerConfig) -> WorkerConfig:
    """The same config, of a worker that leaves room for the head's keys and values too. Raises ModelError."""
    if config.device.startswith("cuda") and config.backend not in HEADS:
        raise _not_there("GPUs")
    info = check_checkpoint(Path(config.model), weights=False)
    spec = check_head(_directory(config), info.spec).spec
    dtype = info.dtype if config.dtype == "auto" else config.dtype
    num_bytes = spec.kv_bytes_per_token(WIDE.get(dtype, 2)) * config.block_size
    return msgspec.structs.replace(config, block_bytes_beside=num_bytes)


def load(config: WorkerConfig, backend: Backend) -> "EagleDrafter":
    """The factory of the registry of drafters. Raises ModelError."""
    facts = backend.facts
    if facts.backend not in HEADS:
        raise _not_there(f"backend {facts.backend}")
    head = check_head(_directory(config), check_checkpoint(Path(config.model), weights=False).spec)
    load_head: LoadHead = import_module(HEADS[facts.backend]).load_head
    logger.info(
        "drafts come from the EAGLE-3 head %s, on hidden states before layers %s",
        head.info.path, ", ".join(map(str, head.feature_layers)),
    )  # fmt: skip
    return EagleDrafter(load_head(config, head, backend), head, facts)


def _directory(config: WorkerConfig) -> Path:
    assert config.speculation is not None
    assert config.speculation.model is not None, "the service wants one"
    return Path(config.speculation.model)


def _not_there(where: str) -> ModelError:
    return ModelError(
        f"--speculative-config: method eagle3 is not there on {where} yet: give method ngram, suffix or draft_model"
    )


@dataclass(slots=True, eq=False)
class _Stand:
    """How far the head is with a row. Position p of the head has the model's hidden states at p and token p + 1."""

    origin: int
    """The row's block with which the head begins: it does not see those before."""
    num_read: int
    """It has keys and values of the positions before, which follow from the row's history."""
    first: int
    features: Floats
    """Of the positions from ``first`` on, (positions, feature layers * hidden): those that it has not read, and always
    the newest, from which it drafts."""

    @property
    def end(self) -> int:
        """The position after the newest whose features are known."""
        return self.first + len(self.features)


class _Span(NamedTuple):
    """What a step of the head computes of a row."""

    row: Row
    stand: _Stand
    start: int
    token_ids: list[int]


class EagleDrafter(Drafter):
    """A ``Drafter`` that keeps pages and reads features: it drafts what the head finds likeliest, a step of the head
    for each token.

    The head reads a prompt as the model computes it. What the model had computed before, since others had the same
    prefix, the head has if it read these blocks then; else it begins behind them.
    """

    def __init__(self, head: DraftHead, checkpoint: HeadCheckpoint, facts: WorkerFacts) -> None:
        self._head = head
        self.feature_layers = checkpoint.feature_layers
        """Before which layers of the model its hidden states are wanted."""
        self._num_features = checkpoint.spec.fc_columns
        self._block_size = facts.block_size
        self._stands: dict[Row, _Stand] = {}
        self._origins = np.full(facts.num_blocks, -1, dtype=np.int64)
        """Of each block that the head has whole: with which block of the rows it began. Positions are counted from
        there, so that only rows for which it began with the same one can share it."""

    def attach(self, table: RowTable) -> None:
        """All rows."""
        self._table = table

    def renew(self, block_ids: Sequence[int]) -> None:
        """The blocks are somebody else's now, or have another one's content: whatever the head had there is lost."""
        self._origins[list(block_ids)] = -1
        self._head.renew(block_ids)

    def forget(self, row: Row) -> None:
        """The row is dropped."""
        self._stands.pop(row, None)

    def read(self, batch: Batch, features: Floats) -> None:
        """Keeps the features of positions that are certain, and reads those that fill a block: so little is kept."""
        lines = features.reshape(len(features), self._num_features)
        spans = []
        for row, start, end, first in zip(
            batch.rows, batch.starts.tolist(), batch.ends.tolist(), batch.token_starts.tolist(), strict=False
        ):
            if not row.max_drafts or row.pooled is not None:
                continue
            stand = self._stands.get(row)
            if stand is None:
                stand = self._stands[row] = self._begin(row, start)
            known = min(end, row.num_computed)  # drafts that were wrong are behind
            part = lines[first + stand.end - start : first + known - start]
            stand.features = np.concatenate((stand.features, part))
            if stand.end // self._block_size > stand.num_read // self._block_size:
                spans.append(self._unread(row, stand, stand.num_read))
        if spans:
            self._read(spans, drafts=False)

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """For each row as many tokens as may be; none as long as it has no features of its newest position."""
        proposals = {row: Proposal([], []) for row, _ in wanted}
        most = dict(wanted)
        spans = []
        for row in proposals:
            stand = self._stands.get(row)
            if stand is not None and stand.end == len(row.history) - 1 and len(stand.features):
                assert stand.end + most[row] - 1 <= row.num_blocks * self._block_size, "drafts have blocks"
                spans.append(self._unread(row, stand, min(stand.num_read, stand.end - 1)))
        if spans:
            step, result = self._read(spans, drafts=True)
            self._draft(step, result, [span.row for span in spans], proposals, most)
        return list(proposals.values())

    def _begin(self, row: Row, start: int) -> _Stand:
        """Where the head begins with a row whose features are known from ``start`` on."""
        blocks = self._table.blocks(row, 0)[: -(-start // self._block_size)]
        origin = int(self._origins[blocks[-1]]) if len(blocks) else 0
        if origin < 0 or (self._origins[blocks[origin:]] != origin).any():
            origin = len(blocks)
        begin = max(start, origin * self._block_size)
        return _Stand(origin, begin, begin, np.empty((0, self._num_features), dtype=np.float32))

    def _unread(self, row: Row, stand: _Stand, start: int) -> _Span:
        return _Span(row, stand, start, row.history[start + 1 : stand.end + 1])

    def _read(self, spans: list[_Span], drafts: bool) -> tuple[HeadStep, HeadResult]:
        """Has the head read what is known of rows, in the order in which the spans are then, and draft after it
        perhaps."""
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
            features=np.concatenate([span.stand.features[span.start - span.stand.first :] for span in spans]),
        )
        result = self._head.run(step)
        for row, stand, start, _ in spans:
            begin, end = start // self._block_size, stand.end // self._block_size
            if end > begin:
                self._origins[self._table.blocks(row, begin)[: end - begin]] = stand.origin
            stand.num_read, stand.first, stand.features = stand.end, stand.end - 1, stand.features[-1:].copy()
        return step, result

    def _draft(
        self, step: HeadStep, result: HeadResult, rows: list[Row], proposals: dict[Row, Proposal], most: dict[Row, int]
    ) -> None:
        """Goes on from a step that drafted for each of its rows, until each has as many drafts as may be."""
        while True:
            for row, token_id, probability in zip(rows, result.token_ids, result.probabilities, strict=True):
                proposals[row].token_ids.append(token_id)
                proposals[row].confidences.append(probability)
            going_on = [at for at, row in enumerate(rows) if len(proposals[row].token_ids) < most[row]]
            if not going_on:
                return
            rows = [rows[at] for at in going_on]
            step = HeadStep(
                token_ids=np.array([proposals[row].token_ids[-1] for row in rows]),
                starts=step.ends[going_on],
                ends=step.ends[going_on] + 1,
                tables=step.tables[going_on],
                block_size=self._block_size,
                sampled=np.arange(len(rows)),
                hidden=result.hidden[going_on],
            )
            result = self._head.run(step)
