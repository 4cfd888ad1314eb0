"""Tokens that must not come next at a sampled position: stops before ``min_tokens``, and tokens that would complete a
bad word."""

from collections.abc import Iterator

import numpy as np

from penstock.models.batch.rows import Ids
from penstock.models.batch.sampled_positions import SampledPosition


def forbidden_ids(sample: SampledPosition) -> Iterator[Ids]:
    """Yields int64 arrays of token ids, and nothing if no token is forbidden. An id may occur more than once."""
    sampling = sample.sampling
    if sample.num_output_tokens < sampling.min_tokens:
        yield sample.lists.stops
    if not sampling.bad_words:
        return
    [last] = sample.tail(1)
    words = [
        word[-1]
        for word in sampling.bad_words
        if len(word) == 1 or (word[-2] == last and sample.tail(len(word) - 1) == word[:-1])
    ]
    if words:
        yield np.array(words, dtype=np.int64)
