"""Whether evicted blocks are copied back from the host tier or computed again. Knows times and lengths; no rows."""

from collections.abc import Sequence

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.plan import WorkerFacts
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork


class HostTierRestorePolicy:
    """What a sequence may find in the host tier."""

    def __init__(self, kv: KVCacheManager, model: StepTimeModel, facts: WorkerFacts) -> None:
        self._kv = kv
        self._model = model
        self._copy_s = facts.copy_us_per_block * 1e-6
        self._max_batched_tokens = facts.max_num_batched_tokens

    def find(self, hashes: Sequence[bytes], num_found: int, num_tokens: int) -> Sequence[bytes]:
        """Hashes of the blocks to be copied back behind the ``num_found`` blocks that are on the device; none where
        computing them is predicted to be faster.

        All or none: each costs the same to copy, and more to compute than the one before it, so that the best part of
        them would be the whole.
        """
        evicted = self._kv.find_evicted(hashes, num_found, num_tokens)
        return evicted if evicted and self._pays(num_found, len(evicted)) else ()

    def _pays(self, num_found: int, num_evicted: int) -> bool:
        size = self._kv.block_size
        num_tokens, mean = num_evicted * size, (num_found + num_evicted / 2) * size
        steps = num_tokens / self._max_batched_tokens
        again_s = self._model.predict(StepWork(num_tokens, num_tokens * mean, 0, 0, steps, steps * mean), steps)
        # Nothing is known for a few steps alone, before which nothing can have been evicted but by something huge.
        return again_s is None or num_evicted * self._copy_s <= again_s
