"""Divides the time of a step among tenants under ``fair``, so that one tenant's load does not slow down the tokens of
others.

If others decode in the same step, a tenant prolongs it at most by its share, by weight, or by as much as the step takes
without any row, which is long for a large model. Rows beyond that sit the step out, and go first in a later one. What a
tenant leaves of its share it may take later, so a prompt of a tenant with little load need not be split. Rows hardly
prolong the steps of a GPU, so they rarely sit out there.
"""

import math
from collections.abc import Iterable

from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.sequence import SequenceState
from penstock.scheduler.planning.tenants import TenantUse
from penstock.scheduler.timing.step_time import DecodeCosts, StepTimeModel, StepWork

MIN_ROWS_S = 0.005
"""The time that a tenant's decoding rows may always add to a step."""
MIN_SHARE_S = 0.015
"""The time that its rows and chunks together may always add: a prompt that is cut into many chunks costs more."""
MAX_SAVED_S = 0.015
"""What a tenant may take beyond its share, if it left as much of its share of earlier steps."""


def prefill_budget(context: PlanningContext, model: StepTimeModel, num_decodes: int, budget: int) -> int:
    """Returns a step's budget for chunks, limited so that ``num_decodes`` decoding rows are not delayed too much."""
    if not num_decodes or not budget:
        return budget
    running, decode_kv = context.running, context.decode_kv
    length = running.prefilling[0].num_planned if running.prefilling else 0
    targets = {row.live.request.target_itl_s for row in running.decoding}
    if None in targets:
        budget = model.max_prefill(num_decodes, decode_kv, length, context.config.target_itl_s, budget)
    own = [target_s for target_s in targets if target_s is not None]
    return model.max_prefill(num_decodes, decode_kv, length, min(own), budget) if own else budget


class StepShares:
    """What each tenant may take of one step."""

    def __init__(self, step: int, decoding: Iterable[SequenceState], costs: DecodeCosts, base_s: float) -> None:
        """``decoding``: the rows that want a token; a step takes ``base_s`` without them."""
        self.sitting_out: set[SequenceState] = set()
        """Decoding rows beyond their tenant's share."""
        self._step = step
        self._least_s = max(MIN_ROWS_S, base_s)
        wanted: dict[TenantUse, list[tuple[SequenceState, float]]] = {}
        for sequence in decoding:
            seconds = costs.row_s + costs.position_s * sequence.length_bound
            wanted.setdefault(sequence.live.tenant, []).append((sequence, seconds))
        self._wanted_s = {tenant: sum(seconds for _, seconds in rows) for tenant, rows in wanted.items()}
        self._total_s = sum(self._wanted_s.values())
        self._total_weight = sum(tenant.limits.weight for tenant in wanted)
        self._left_s: dict[TenantUse, float] = {}
        self._drafts_left_s: dict[TenantUse, float] = {}
        self._draft_s = costs.draft_s
        self._chunked: set[TenantUse] = set()
        """Tenants with a chunk."""
        for tenant, rows in wanted.items():
            limit_s, taken_s = self._rows_s(tenant), self._wanted_s[tenant]
            if taken_s > limit_s:
                taken_s = self._choose(tenant, rows, limit_s)
            self._drafts_left_s[tenant] = limit_s - taken_s
            self.take(tenant, taken_s)

    def left_s(self, tenant: TenantUse) -> float:
        """Returns what the tenant may still take; infinite if no other tenant decodes."""
        left_s = self._left_s.get(tenant)
        if left_s is None:
            num_missed = max(0, self._step - tenant.saved_at - 1)
            saved_s = min(MAX_SAVED_S, tenant.saved_s + num_missed * MIN_SHARE_S)
            left_s = self._left_s[tenant] = max(MIN_SHARE_S, self._rows_s(tenant)) + saved_s
        return left_s

    def take(self, tenant: TenantUse, seconds: float) -> None:
        left_s = self._left_s[tenant] = self.left_s(tenant) - seconds
        tenant.saved_s, tenant.saved_at = max(-MAX_SAVED_S, min(left_s, MAX_SAVED_S)), self._step

    def take_chunk(self, sequence: SequenceState, budget: int, decodes: StepWork, model: StepTimeModel) -> int:
        """Returns the maximum number of tokens of a sequence's chunk, at most ``budget``, for its tenant's share of a
        step with these decoding rows; records that the tenant takes their time."""
        tenant, decodes_s = sequence.live.tenant, model.predict(decodes)
        left_s = self.left_s(tenant)
        if math.isinf(left_s) or decodes_s is None:
            return budget
        start, num_decodes, decode_kv = sequence.num_planned, int(decodes.decodes), int(decodes.decode_kv)
        limit = model.max_prefill(num_decodes, decode_kv, start, decodes_s + left_s, budget)
        num_tokens = min(limit, sequence.prefill_end - start)
        end = start + num_tokens
        chunk = decodes._replace(
            prefill_tokens=num_tokens, prefill_kv=num_tokens * (start + end) // 2, chunks=1, chunk_kv=end
        )
        self._chunked.add(tenant)
        self.take(tenant, (model.predict(chunk) or decodes_s) - decodes_s)
        return num_tokens

    def has_its_chunks(self, tenant: TenantUse) -> bool:
        """Returns whether the tenant may have no other chunk. It may have one, even if its rows took its share."""
        return tenant in self._chunked and self.left_s(tenant) <= 0

    def take_drafts(self, tenant: TenantUse, num_drafts: int) -> int:
        """Returns how many of these drafts a row of the tenant may have, and records that they are taken."""
        left_s = self._drafts_left_s[tenant]
        if left_s <= 0:
            return 0
        if num_drafts * self._draft_s > left_s:
            num_drafts = int(left_s / self._draft_s)
        self._drafts_left_s[tenant] = left_s - num_drafts * self._draft_s
        return num_drafts

    def _rows_s(self, tenant: TenantUse) -> float:
        """Returns the seconds of a step that the tenant's decoding rows and their drafts may take."""
        weight = tenant.limits.weight
        others_s = self._total_s - self._wanted_s.get(tenant, 0.0)
        others_weight = self._total_weight - (weight if tenant in self._wanted_s else 0.0)
        return max(self._least_s, others_s * weight / others_weight) if others_weight > 0 else math.inf

    def _choose(self, tenant: TenantUse, rows: list[tuple[SequenceState, float]], limit_s: float) -> float:
        """Chooses rows up to the limit, and at least one, beginning after the last one that was chosen in an earlier
        step. The others sit out. Returns the chosen rows' time."""
        taken_s, last = 0.0, tenant.last_in_share
        for sequence, seconds in sorted(rows, key=lambda row: (row[0].rank <= last, row[0].rank)):
            if not taken_s or taken_s < limit_s:
                tenant.last_in_share = sequence.rank
                taken_s += seconds
            else:
                self.sitting_out.add(sequence)
        return taken_s
