"""Masks for positions where a row's reasoning limit forces a token, combined with the masks of grammars."""

import threading
from collections.abc import Sequence

import numpy as np

from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.sampled_positions import GrammarBitmasks, SampledPosition


def with_forced_tokens(
    sampled: Sequence[SampledPosition], masks: GrammarBitmasks | None, known: threading.Event, vocab_size: int
) -> GrammarBitmasks | None:
    """Returns the masks of grammars together with those of forced tokens, which few steps have. ``known`` is set once
    the histories are known."""
    forcing = {
        index
        for index, sample in enumerate(sampled)
        if (reasoning := sample.row.reasoning) is not None
        and reasoning.may_force(sample.row.history, sample.position - len(sample.drafts), sample.drafts)
    }
    if not forcing:
        return masks
    indices = sorted(forcing.union(() if masks is None else masks.sampled))
    words = _JoinedWords({index: sampled[index] for index in indices}, forcing, masks, known, vocab_size)
    return GrammarBitmasks(indices, words, frozenset() if masks is None else masks.late)


class _JoinedWords:
    """The masks of one batch."""

    def __init__(
        self,
        sampled: dict[int, SampledPosition],
        forcing: set[int],
        masks: GrammarBitmasks | None,
        known: threading.Event,
        vocab_size: int,
    ) -> None:
        self._sampled = sampled
        self._forcing = forcing
        self._masks = masks
        self._known = known
        self._num_words = -(-vocab_size // 32)

    def result(self) -> Words:
        """See ``MaskWords``."""
        grammars = None if self._masks is None else self._masks.words.result()
        places = {} if self._masks is None else {index: place for place, index in enumerate(self._masks.sampled)}
        num_words = self._num_words if grammars is None else max(self._num_words, grammars.shape[1])
        words: Words = np.zeros((len(self._sampled), num_words), dtype=np.uint32)
        self._known.wait()
        for line, (index, sample) in zip(words, self._sampled.items(), strict=True):
            row = sample.row
            forced: int | None = None
            if index in self._forcing:
                assert row.reasoning is not None, "it has a limit"
                end = sample.position - len(sample.drafts)
                forced = row.reasoning.forced_token(row.history, end, sample.drafts)
            if forced is not None:
                line[forced // 32] = np.uint32(1 << (forced % 32))
            elif index in places:
                assert grammars is not None
                line[: grammars.shape[1]] = grammars[places[index]]
            elif row.lists.allowed is None:
                line[:] = np.uint32(0xFFFFFFFF)
            else:
                bits = np.zeros(32 * num_words, dtype=bool)
                bits[row.lists.allowed] = True
                line[:] = np.packbits(bits, bitorder="little").view(np.uint32)
        return words
