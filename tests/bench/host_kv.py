"""A long prompt whose KV was evicted: copied back from host memory against computed again.

Two prompts take turns in a KV cache that has room for one of them. Prints when the first token comes in each case,
whether the KV that came back is what was evicted, bit for bit, and what is done where copies would take too long.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.models.backend import load_backend
from penstock.models.checkpoint import DEMO, check_checkpoint, resolve_model
from penstock.models.runner import Runner
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import SamplingParams, WorkerConfig
from penstock.scheduler.request import Event, Finished, Released, Request
from penstock.scheduler.scheduler import Scheduler

VOCAB = 4000
BLOCK_SIZE = 16
SALT = tenant_salt(DEMO, "bench")
SLOW_COPY_US = 1e6


class IdsOnly:
    """No text."""

    def feed(self, token_id: int) -> Released:
        """Lets the token go."""
        return Released(1, "")

    def finish(self) -> Released:
        """Holds nothing."""
        return Released(0, "")


@dataclass
class Prompt:
    """One of the two."""

    token_ids: list[int]
    hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.hashes = hash_blocks(self.token_ids, BLOCK_SIZE, SALT)


class Service:
    """A scheduler and its worker, by turns, without processes between them."""

    def __init__(self, backend: Any, copy_us_per_block: float) -> None:
        facts = replace(backend.facts, copy_us_per_block=copy_us_per_block)
        self.scheduler = Scheduler(facts, SchedulerConfig(max_plans_in_flight=1))
        self._backend = backend
        self._runner = Runner(backend)
        self._num_requests = 0

    def first_token(self, prompt: Prompt) -> tuple[float, int]:
        """Seconds until a request has its only token, and how many of its prompt's came from the cache."""
        ends: list[Finished] = []

        def note(event: Event) -> None:
            if isinstance(event, Finished):
                ends.append(event)

        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0)
        request = Request(
            str(self._num_requests), prompt.token_ids, prompt.hashes, sampling, 1, note, IdsOnly, hash_salt=SALT
        )
        began = time.perf_counter()
        self.scheduler.add(request)
        while not ends:
            plan = self.scheduler.schedule()
            assert plan is not None
            self.scheduler.update(self._runner.run(plan))
        return time.perf_counter() - began, ends[0].usage.cached_tokens

    def content(self, prompt: Prompt) -> list[Tensor]:
        """Its whole blocks, as they lie on the device."""
        blocks = [self.scheduler.kv.pool.find(block_hash) for block_hash in prompt.hashes]
        assert None not in blocks, "it was just used"
        return [pages[blocks].cpu() for pages in self._backend._host_pages._blocks]


def new_backend(args: argparse.Namespace) -> Any:
    """The demo model with a cache for one prompt, and host memory for two."""
    path = resolve_model(DEMO)
    spec = check_checkpoint(path).spec
    num_blocks = args.tokens // BLOCK_SIZE + 1
    block_bytes = spec.kv_bytes_per_token(torch.bfloat16.itemsize) * BLOCK_SIZE
    config = WorkerConfig(
        str(path),
        device=args.device,
        backend=args.backend,
        dtype="bfloat16",
        max_model_len=num_blocks * BLOCK_SIZE,
        kv_cache_bytes=(num_blocks + 1) * block_bytes,
        host_kv_cache_bytes=2 * num_blocks * block_bytes,
        num_threads=args.threads,
    )
    return load_backend(config)


def is_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit: a NaN that came back would be equal."""
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Prints both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt, besides the last (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of two prompts each (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--backend", default="reference", help="reference or cuda (default %(default)s)")
    args = parser.parse_args()
    prompts = [Prompt([(n * 7919 + i * 31 + i * i) % VOCAB for i in range(args.tokens + 1)]) for n in range(2)]
    backend = new_backend(args)
    service = Service(backend, backend.facts.copy_us_per_block)
    computed, restored, equal = [], [], True
    for _ in range(args.rounds):
        service.scheduler.kv.flush()
        contents = []
        for prompt in prompts:
            seconds, cached = service.first_token(prompt)
            assert cached == 0
            computed.append(seconds)
            contents.append(service.content(prompt))
        for prompt, content in zip(prompts, contents, strict=True):
            seconds, cached = service.first_token(prompt)
            assert cached == args.tokens, f"{cached} tokens came from the cache"
            restored.append(seconds)
            equal = equal and is_equal(content, service.content(prompt))
    slow = Service(backend, SLOW_COPY_US)
    for prompt in [*prompts, prompts[0]]:
        slow.first_token(prompt)
    num_slow = slow.scheduler.kv.num_restored_tokens

    print(f"the first token of {args.tokens + 1:,}, backend {args.backend} on {args.device}; {len(restored)} of each")
    print(f"{'':>24}{'p50 ms':>10}{'all, ms':>50}")
    for name, times in (("computed again", computed), ("from host memory", restored)):
        each = " ".join(f"{1000 * seconds:.0f}" for seconds in times)
        print(f"{name:>24}{1000 * statistics.median(times):>10.0f}{each:>50}")
    speedup = statistics.median(computed) / statistics.median(restored)
    print(
        f"a copy of a block takes {backend.facts.copy_us_per_block:.0f} us; the first token comes {speedup:.1f} times "
        f"sooner; what came back is byte-equal: {'yes' if equal else 'NO'}"
    )
    print(f"if a copy took {SLOW_COPY_US * 1e-6:.0f} s: {num_slow:,} tokens come from host memory")
    good = speedup > 1 and equal and num_slow == 0
    print(
        f"target: byte-equal, sooner than computing, and computed where that is sooner: {'met' if good else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
