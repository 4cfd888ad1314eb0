"""Decides whether evicted blocks are copied back from the host tier or recomputed. It uses times and lengths, not
rows."""

from collections.abc import Sequence

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork
from penstock.scheduler.worker_config import WorkerFacts


class HostTierRestorePolicy:
    """Finds the blocks that a sequence restores from the host tier."""

    def __init__(self, kv: KVCacheManager, model: StepTimeModel, facts: WorkerFacts) -> None:
        self._kv = kv
        self._model = model
        self._copy_s = facts.copy_us_per_block * 1e-6
        self._max_batched_tokens = facts.max_num_batched_tokens

    def find(self, hashes: Sequence[bytes], num_found: int, num_tokens: int) -> Sequence[bytes]:
        """Returns the hashes of the blocks to copy back after the ``num_found`` blocks on the device; none if
        recomputing them is predicted to be faster.

        It is all or none: each block costs the same to copy, but more to compute than the one before it, so the best
        part would always be the whole.
        """
        evicted = self._kv.find_evicted(hashes, num_found, num_tokens)
        return evicted if evicted and self._pays(num_found, len(evicted)) else ()

    def _pays(self, num_found: int, num_evicted: int) -> bool:
        size = self._kv.block_size
        num_tokens, mean = num_evicted * size, (num_found + num_evicted / 2) * size
        steps = num_tokens / self._max_batched_tokens
        again_s = self._model.predict(StepWork(num_tokens, num_tokens * mean, 0, 0, steps, steps * mean), steps)
        # No prediction exists for only the first few steps, before which hardly anything can have been evicted.
        return again_s is None or num_evicted * self._copy_s <= again_s
