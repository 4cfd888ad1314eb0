"""Tokens that must not come next in a line: stops before ``min_tokens``, and what would complete a bad word."""

from collections.abc import Iterator

import numpy as np

from penstock.models.batch.rows import Ids
from penstock.models.batch.sampled_positions import SampledPosition


def forbidden_ids(sample: SampledPosition) -> Iterator[Ids]:
    """int64 arrays of ids, none of them where nothing is forbidden; an id may come twice."""
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
