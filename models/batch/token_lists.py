"""A row's sampling parameters that name tokens, as arrays. They are built once and used in every step."""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.plan import SamplingParams


class TokenLists:
    """Ids are int64, biases float64. ``allowed`` is None if every token is allowed."""

    __slots__ = ("allowed", "bias", "bias_ids", "stops")

    def __init__(self, sampling: SamplingParams) -> None:
        self.allowed = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
        self.bias_ids = _ids(tuple(token_id for token_id, _ in sampling.logit_bias))
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
        self.stops = _ids(sampling.stop_token_ids)


def _ids(token_ids: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)
