"""What the prefix cache costs the event loop: blocks published, evicted and retained, and subscribers told of them.

A pool of published blocks is filled, read as a subscriber reads it, retained, and evicted. Prints the best of several
runs, in microseconds a block; what one block and one subscriber take in memory; and what a full message costs.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.kv.events import KvEventReader
from penstock.kv.manager import KVCacheManager
from penstock.service.admin.kv_events import message
from penstock.service.kv_publisher.watchers import MAX_MESSAGE_BYTES

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
RUNS = 5


class Timed:
    """The best time of each thing that is measured."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Once more."""
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        self.seconds[name] = min(seconds, self.seconds.get(name, seconds))


def measure(timed: Timed, token_ids: list[int], hashes: list[bytes]) -> None:
    """A pool's life."""
    num_blocks = len(hashes)
    kv = KVCacheManager(num_blocks, BLOCK_SIZE)
    table = kv.allocate([], len(token_ids))
    assert table is not None

    def publish() -> None:
        for index in range(num_blocks):
            kv.publish(table, hashes, index, index + 1, token_ids)

    def tell() -> None:
        reader = KvEventReader(kv.events)
        while not reader.is_up_to_date:
            message(kv.events, reader.read(MAX_MESSAGE_BYTES)).SerializeToString()

    timed.run("published, as rows decode", publish)
    timed.run("told to a new subscriber", tell)
    timed.run("released", lambda: kv.pool.release(table))
    # Half of the pool is one owner's bound.
    kv.pool.retain(hashes[: num_blocks // 2], 1.0, "one")
    timed.run("retained", lambda: kv.pool.retain(hashes, 2.0, "other"))
    timed.run("lapsed", lambda: kv.pool.expire(3.0))
    timed.run("evicted", lambda: kv.allocate([], len(token_ids)))


def memory(token_ids: list[int], hashes: list[bytes]) -> tuple[float, float]:
    """Bytes a block that the events keep, and that a new subscriber takes until it has been told."""
    kv = KVCacheManager(len(hashes), BLOCK_SIZE)
    tracemalloc.start()
    parent = b""
    for index, block_hash in enumerate(hashes):
        kv.events.stored(block_hash, parent, token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
        parent = block_hash
    kept = tracemalloc.get_traced_memory()[0]
    reader = KvEventReader(kv.events)
    reader.read(1)
    pending = tracemalloc.get_traced_memory()[0] - kept
    tracemalloc.stop()
    return kept / len(hashes), pending / len(hashes)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks of the pool (default: %(default)s)")
    num_blocks = parser.parse_args().blocks
    token_ids = [position * 7919 % VOCAB_SIZE for position in range(num_blocks * BLOCK_SIZE)]
    hashes = hash_blocks(token_ids, BLOCK_SIZE, tenant_salt("model", "tenant"))
    timed = Timed()
    for _ in range(RUNS):
        measure(timed, token_ids, hashes)
    print(f"{num_blocks:,} blocks of {BLOCK_SIZE} tokens")
    print(f"{'a block':<28} {'us':>8}")
    for name, seconds in timed.seconds.items():
        print(f"{name:<28} {1e6 * seconds / num_blocks:>8.2f}")
    kept, pending = memory(token_ids, hashes)
    print(f"{'a block in memory':<28} {'bytes':>8}")
    print(f"{'kept for subscribers':<28} {kept:>8.0f}")
    print(f"{'a subscriber not told yet':<28} {pending:>8.0f}")


if __name__ == "__main__":
    main()
