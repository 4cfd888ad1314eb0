"""Drafts what followed the same tokens earlier in the row: prompt lookup (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding). Suits output that quotes earlier text."""

from collections.abc import Sequence

from penstock.models.batch.rows import Row
from penstock.models.speculative.drafter import NO_PROPOSAL, Drafter, Proposal, Wanted
from penstock.models.speculative.row_indexes import RowIndexes, confidences
from penstock.scheduler.worker_config import SpeculationConfig


class NgramDrafter(Drafter):
    """A ``Drafter``. Finds the longest suffix of the row's history, of ``prompt_lookup_min`` (at least 2) to
    ``prompt_lookup_max`` tokens, that occurred before, and proposes what followed it."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max
        self._indexes = RowIndexes()

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Proposes what followed the longest match: the one that continues the last match, or else the newest."""
        self._indexes.extend([row for row, _ in wanted])
        return [self._propose(row, max_drafts) for row, max_drafts in wanted]

    def drop_row(self, row: Row) -> None:
        self._indexes.drop_row(row)

    def _propose(self, row: Row, max_drafts: int) -> Proposal:
        history = row.history
        match = self._indexes.cursor(row).find(history, self._longest, enough=1)
        if match.length < self._shortest:
            return NO_PROPOSAL
        place = match.places[0]
        # If the draft reaches the end of the history, the text since the match repeats.
        period = len(history) - place
        drafts = history[place : place + max_drafts]
        drafts += [drafts[at % period] for at in range(period, max_drafts)]
        return Proposal(drafts, confidences(match.length, len(drafts)))
