"""What drafting costs besides the steps: to propose drafts, to choose their number, and to index a long prompt.

Proposing and choosing take microseconds per row and step; indexing takes time and memory. Each figure is the
best of several runs of one thread.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from penstock.models.batch.rows import Row, RowTable
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.draft_rows import NOTHING
from penstock.models.speculative.drafter import Drafter, Wanted
from penstock.models.speculative.ngram import NgramDrafter
from penstock.models.speculative.suffix import SuffixDrafter
from penstock.models.speculative.token_index import TokenIndex
from penstock.scheduler.plan import AddedRow, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

MAX_DRAFTS = 8
DRAFTERS: dict[str, Callable[[SpeculationConfig], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def texts(length: int, seed: int = 0) -> dict[str, list[int]]:
    """Histories by name: what repeats itself, and what does so only by chance, as words of a language do."""
    rng = np.random.default_rng(seed)
    words = np.minimum(rng.zipf(1.3, length), 50_000).tolist()
    return {"quoted": (words[:500] * (length // 500 + 1))[:length], "words": words, "one token": [7] * length}


def rows_of(history: list[int], number: int) -> RowTable:
    """Rows with that history, half of it prompt."""
    table = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
    sampling = SamplingParams()
    added = [
        AddedRow(row, 0, history, len(history) // 2, 0, [0], sampling, max_drafts=MAX_DRAFTS) for row in range(number)
    ]
    table.apply(StepPlan(0, [], added, [], [], []))
    return table


def propose_us(drafter: Drafter, rows: list[Row], more: list[int]) -> float:
    """A row and step, each of which adds a token."""
    wanted = [Wanted(row, MAX_DRAFTS) for row in rows]
    for _ in range(100):  # until all is indexed
        drafter.propose(wanted)
    best = float("inf")
    for token in more:
        for row in rows:
            row.append(token)
        began = time.perf_counter()
        drafter.propose(wanted)
        best = min(best, time.perf_counter() - began)
    return best / len(rows) * 1e6


def mean_us(drafter: Drafter, rows: list[Row], more: list[int]) -> float:
    """As above, on average."""
    wanted = [Wanted(row, MAX_DRAFTS) for row in rows]
    took = 0.0
    for token in more:
        for row in rows:
            row.append(token)
        began = time.perf_counter()
        drafter.propose(wanted)
        took += time.perf_counter() - began
    return took / len(more) / len(rows) * 1e6


def drafting_us(drafter: Drafter, table: RowTable, number: int) -> tuple[float, float]:
    """A step in which all rows are asked for, a row; and one in which none is worth it, all together."""
    controller = SpeculationController(drafter, MAX_DRAFTS, StepCost(2048), runs_ahead=False)
    for row in range(number):
        controller.add_row(table[row])
    plan = StepPlan(
        0, [], [], [], [], [Decode(row, 1 + MAX_DRAFTS) for row in range(number)], max_drafts=number * MAX_DRAFTS
    )
    asked = idle = float("inf")
    for _ in range(200):
        began = time.perf_counter()
        drafted = controller.propose(plan, table, lambda: None, {})
        if drafted is not NOTHING:
            asked = min(asked, time.perf_counter() - began)
    controller._rows.num_paying = 0
    for _ in range(200):
        controller._prober.spend(1.0)
        began = time.perf_counter()
        assert controller.propose(plan, table, lambda: None, {}) is NOTHING
        idle = min(idle, time.perf_counter() - began)
    return asked / number * 1e6, idle * 1e6


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--rows", type=int, default=16, help="in a step (default: 16)")
    options = parser.parse_args()
    for name, make in DRAFTERS.items():
        config = SpeculationConfig(DraftMethod(name), MAX_DRAFTS)
        for text, tokens in texts(options.history + 1000).items():
            table = rows_of(tokens[: options.history], options.rows)
            rows = [table[row] for row in range(options.rows)]
            drafter = make(config)
            late = rows_of(texts(20_000, seed=1)[text], 1)[0]
            drafter.propose([Wanted(late, 1)])
            drafter.drop_row(late)
            best = propose_us(drafter, rows, tokens[options.history : options.history + 100])
            mean = mean_us(drafter, rows, tokens[options.history + 100 :])
            asked, idle = drafting_us(drafter, table, options.rows)
            print(
                f"{name:6} {text:9}  propose {best:5.1f} us a row, {mean:5.1f} on average; "
                f"with choice {asked:5.1f}; a step without {idle:4.1f}"
            )
    for length in (4096, 131072):
        tokens = np.random.default_rng(2).integers(0, 50_000, length).tolist()
        began = time.perf_counter()
        TokenIndex(tokens).extend(length)
        took = time.perf_counter() - began
        tracemalloc.start()
        index = TokenIndex(tokens)
        index.extend(length)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"index of {length} tokens: {took * 1e3:.1f} ms, {size / index.num_indexed:.0f} bytes a token")


if __name__ == "__main__":
    main()
