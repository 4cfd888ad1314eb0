"""Tokens that must not come next in a row: stops before ``min_tokens``, and what would complete a bad word."""

from collections.abc import Iterator

import numpy as np

from penstock.models.rows import Ids, Row


def forbidden_ids(row: Row) -> Iterator[Ids]:
    """int64 arrays of ids, none of them where nothing is forbidden; an id may come twice."""
    if row.num_output_tokens < row.sampling.min_tokens:
        yield row.lists.stops
    last = row.history[-1]
    words = [
        word[-1]
        for word in row.sampling.bad_words
        if len(word) == 1 or (word[-2] == last and tuple(row.history[1 - len(word) :]) == word[:-1])
    ]
    if words:
        yield np.array(words, dtype=np.int64)
