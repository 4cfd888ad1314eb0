"""Drafts what most often followed the longest suffix of the row's history, in the row or in recent outputs of its
tenant: suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), with chains of places instead of trees of counts.

A tenant's outputs are never used for another tenant: right drafts save time, so the timing would reveal the outputs.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from penstock.models.batch.rows import UNKNOWN, Row
from penstock.models.speculative.drafter import NO_PROPOSAL, Drafter, Proposal, Wanted
from penstock.models.speculative.row_indexes import MAX_INDEXED, RowIndexes, confidences
from penstock.models.speculative.token_index import Cursor, TokenIndex
from penstock.scheduler.worker_config import SpeculationConfig

ENOUGH = 8
"""How many places suffice to estimate how often a draft followed, if the match has the maximum length."""


class _Outputs:
    """A tenant's recent outputs, one after another, each with an end mark."""

    def __init__(self) -> None:
        self.index = TokenIndex([])
        self._lengths: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._lengths)

    def add_tokens(self, token_ids: list[int]) -> int:
        """Adds an output. Returns how many tokens it takes."""
        self.index.tokens += token_ids
        self.index.tokens.append(UNKNOWN)
        self._lengths.append(len(token_ids) + 1)
        return self._lengths[-1]

    def forget_oldest(self) -> int:
        """Removes the oldest output. Returns how many tokens that frees."""
        length = self._lengths.popleft()
        self.index.cut(length)
        return length


class SuffixDrafter(Drafter):
    """A ``Drafter``. Matches have 2 tokens or more, since a single token predicts too little."""

    def __init__(self, config: SpeculationConfig, max_indexed: int = MAX_INDEXED) -> None:
        """``max_indexed`` limits the tokens of all rows and outputs together. Rows come first: to make room for them,
        the oldest outputs of the least recently active tenant are removed."""
        self._config = config
        self._indexes = RowIndexes(max_indexed)
        self._outputs: OrderedDict[str, _Outputs] = OrderedDict()
        """Outputs by tenant. The most recently active tenant is last."""
        self._num_output = 0
        self._cursors: dict[Row, Cursor] = {}
        """Each row's cursor in the outputs of its tenant."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Proposes the most frequent continuation of each row, token by token."""
        portion = self._indexes.extend([row for row, _ in wanted])
        self._make_room()
        for tenant in {row.tenant for row, _ in wanted}:
            outputs = self._outputs.get(tenant)
            if outputs is not None:
                self._outputs.move_to_end(tenant)
                portion -= outputs.index.extend(portion)
        return [self._propose(row, max_drafts) for row, max_drafts in wanted]

    def drop_row(self, row: Row) -> None:
        """Drops the row, but keeps its output for other rows of its tenant."""
        self._indexes.drop_row(row)
        self._cursors.pop(row, None)
        output = row.history[row.num_prompt_tokens :]
        if UNKNOWN in output:  # a step that has not ended chooses it
            output = output[: output.index(UNKNOWN)]
        if not output:
            return
        outputs = self._outputs.setdefault(row.tenant, _Outputs())
        self._outputs.move_to_end(row.tenant)
        self._num_output += outputs.add_tokens(output)
        while len(outputs) > self._config.suffix_decoding_max_cached_requests:
            self._num_output -= outputs.forget_oldest()
        self._make_room()

    def _make_room(self) -> None:
        while self._num_output > self._indexes.room:
            tenant, outputs = next(iter(self._outputs.items()))
            self._num_output -= outputs.forget_oldest()
            if not outputs:
                del self._outputs[tenant]

    def _propose(self, row: Row, max_drafts: int) -> Proposal:
        config, history = self._config, row.history
        max_drafts = min(max_drafts, config.suffix_decoding_max_tree_depth - 2)
        longest = config.suffix_decoding_max_tree_depth - max_drafts
        own = self._indexes.cursor(row)
        best = own.find(history, longest, ENOUGH)
        followers = [(history, place) for place in best.places]
        length = best.length
        others = self._cursor_in_outputs(row)
        if others is not None:
            best = others.find(history, longest, ENOUGH)
            if best.length >= length:
                followers = [*(followers if best.length == length else ()),
                             *((others.index.tokens, place) for place in best.places)]  # fmt: skip
                length = best.length
        if not followers:
            return NO_PROPOSAL
        most = min(max_drafts, int(config.suffix_decoding_max_spec_factor * length))
        drafts, shares = _most_frequent(followers, most, config.suffix_decoding_min_token_prob)
        sure = confidences(length, len(drafts))
        return Proposal(drafts, [share * each for share, each in zip(shares, sure, strict=True)])

    def _cursor_in_outputs(self, row: Row) -> Cursor | None:
        outputs = self._outputs.get(row.tenant)
        if outputs is None:
            return None
        cursor = self._cursors.get(row)
        if cursor is None or cursor.index is not outputs.index:
            cursor = self._cursors[row] = Cursor(outputs.index)
        return cursor


def _most_frequent(
    followers: list[tuple[list[int], int]], most: int, min_share: float
) -> tuple[list[int], list[float]]:
    """Returns the most frequent continuation, token by token, and the share of the places that have each token among
    those that agree so far. Ends after ``most`` tokens, or if fewer than ``min_share`` of all places agree.
    ``followers`` has sequences, and an index into each."""
    # Most places continue alike, so equal continuations are counted together.
    agreeing = Counter(tuple(sequence[place : place + most]) for sequence, place in followers)
    drafts: list[int] = []
    shares: list[float] = []
    num_agreeing = len(followers)
    fewest = min_share * num_agreeing
    for offset in range(most):
        counts: Counter[int] = Counter()
        for tokens, count in agreeing.items():
            counts[tokens[offset] if offset < len(tokens) else UNKNOWN] += count
        token = max(counts, key=counts.__getitem__)  # if two are equally frequent, the first one seen
        if token == UNKNOWN or counts[token] < fewest:
            break
        drafts.append(token)
        shares.append(counts[token] / num_agreeing)
        if len(counts) > 1:
            num_agreeing = counts[token]
            agreeing = Counter({key: count for key, count in agreeing.items() if key[offset : offset + 1] == (token,)})
    return drafts, shares
