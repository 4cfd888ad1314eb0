"""The tokens and the noise of the torch sampler, with which the CPU library's are compared.

PENSTOCK_RECORD_TORCH names a file to which they are written as well, and PENSTOCK_RECORDED_TORCH one from which they
are read where there is no torch, as on an emulated Arm. A call is identified by its test, without its instruction
set, and by its number in it.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from cpu_sampler import masks_of
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import LEVELS
from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.rows import Row
from penstock.models.batch.sampled_positions import SampledPosition

Floats = NDArray[np.float32]
Values = TypeVar("Values", list[int], list[float])

_recorded = os.environ.get("PENSTOCK_RECORDED_TORCH")
_replies: Mapping[str, Any] | None = json.loads(Path(_recorded).read_text()) if _recorded else None
_recording = os.environ.get("PENSTOCK_RECORD_TORCH")
_made: dict[str, object] = {}
_calls: Counter[str] = Counter()


def torch_tokens(logits: Floats, rows: Sequence[Row], masks: Sequence[Words] | None = None) -> list[int]:
    """The token of each row, from its float32 logits and, if there are masks, its mask."""
    return _replies[_call()] if _replies is not None else _kept(_sample(logits, rows, masks))


def torch_noise(seed: int, position: int, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """The noise of each token id, float64."""
    return np.array(_replies[_call()] if _replies is not None else _kept(_noise(seed, position, ids)))


def _sample(logits: Floats, rows: Sequence[Row], masks: Sequence[Words] | None) -> list[int]:
    import torch

    from penstock.models.backends.torch_common.sampler import sample_positions

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    positions = [SampledPosition(row) for row in rows]
    sampled = sample_positions(torch.from_numpy(logits.copy()), positions, None if masks is None else masks_of(masks))
    torch.set_num_threads(before)
    return [int(each.token_id) for each in sampled]


def _noise(seed: int, position: int, ids: NDArray[np.int32]) -> list[float]:
    import torch

    from penstock.kernels.reference.sampling import keyed_gumbel

    noise: list[float] = keyed_gumbel(torch.tensor(seed), torch.tensor(position), torch.from_numpy(ids).long()).tolist()
    return noise


def _call() -> str:
    """Names this call."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2]
    calls = _calls[test] = _calls[test] + 1
    return f"{re.sub('|'.join(LEVELS), '', test)} {calls}"


def _kept(values: Values) -> Values:
    if _recording:
        _made[_call()] = values
        Path(_recording).write_text(json.dumps(_made))
    return values
