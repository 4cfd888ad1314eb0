"""A long prompt whose KV was evicted: copied back from host memory against computed again.

Two prompts take turns in a KV cache that has room for one of them. Prints when the first token comes in each case,
whether the KV that came back is what was evicted, bit for bit, and what is done where copies would take too long.
On the reference backend: ``make bench-gpu`` has the same for the one for GPUs.
"""

import argparse
import statistics

import torch
from gpu_bench.host_memory import Turns, compare_ways, num_blocks

from penstock.models.backends.base import load_backend
from penstock.models.backends.reference.backend import ReferenceBackend
from penstock.models.checkpoint.checkpoint import DEMO, check_checkpoint, resolve_model
from penstock.scheduler.worker_config import WorkerConfig

BLOCK_SIZE = 16
SLOW_COPY_US = 1e6


def new_backend(tokens: int, threads: int) -> ReferenceBackend:
    """The demo model with a cache for one prompt, and host memory for two."""
    path = resolve_model(DEMO)
    spec = check_checkpoint(path).spec
    blocks = num_blocks(tokens, BLOCK_SIZE)
    block_bytes = spec.kv_bytes_per_token(torch.bfloat16.itemsize) * BLOCK_SIZE
    config = WorkerConfig(
        str(path),
        backend="reference",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        max_model_len=blocks * BLOCK_SIZE,
        kv_cache_bytes=(blocks + 1) * block_bytes,
        host_kv_cache_bytes=2 * blocks * block_bytes,
        num_threads=threads,
    )
    backend = load_backend(config)
    assert isinstance(backend, ReferenceBackend)
    return backend


def main() -> None:
    """Prints both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt, besides the last (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of two prompts each (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default %(default)s)")
    args = parser.parse_args()
    backend = new_backend(args.tokens, args.threads)
    found = compare_ways(Turns(backend, args.tokens), args.rounds)
    assert found.restored_tokens == args.tokens, f"{found.restored_tokens} tokens came from the cache"
    slow = Turns(backend, args.tokens, copy_us_per_block=SLOW_COPY_US)
    for prompt in [*slow.prompts, slow.prompts[0]]:
        slow.first_token(prompt)
    num_slow = slow.scheduler.kv.num_restored_tokens

    print(f"the first token of {args.tokens + 1:,}, {len(found.restored_s)} of each")
    print(f"{'':>24}{'p50 ms':>10}{'all, ms':>50}")
    for name, times in (("computed again", found.computed_s), ("from host memory", found.restored_s)):
        each = " ".join(f"{1000 * seconds:.0f}" for seconds in times)
        print(f"{name:>24}{1000 * statistics.median(times):>10.0f}{each:>50}")
    speedup = statistics.median(found.computed_s) / statistics.median(found.restored_s)
    print(
        f"a copy of a block takes {backend.facts.copy_us_per_block:.0f} us; the first token comes {speedup:.1f} times "
        f"sooner; what came back is byte-equal: {'yes' if found.is_equal else 'NO'}"
    )
    print(f"if a copy took {SLOW_COPY_US * 1e-6:.0f} s: {num_slow:,} tokens come from host memory")
    good = speedup > 1 and found.is_equal and num_slow == 0
    print(
        f"target: byte-equal, sooner than computing, and computed where that is sooner: {'met' if good else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
