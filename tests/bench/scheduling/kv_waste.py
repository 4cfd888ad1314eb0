"""How much of the KV cache is held and unused, at the lengths of the workloads of `make bench-cpu`.

A slot is room for one token's keys and values. Of those that rows hold after each step some have KV, some are kept for
the rest of a prompt that has begun, and the others are waste: the end of a row's last block. All requests come at once
and share nothing.
"""

import argparse

from cpu_bench import workloads

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import FakeRow, Slots
from penstock.scheduler.testing.simulation import checked_simulation
from penstock.scheduler.timing.step_time import StepWork


class HeldSlots(Slots):
    """Counts, step by step, what rows hold."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[int, FakeRow] = {}
        self.held = self.waiting = self.wasted = 0

    def start_row(self, row: FakeRow) -> None:
        """It holds its blocks from now on."""
        self._rows[row.number] = row

    def end(self, row: FakeRow) -> None:
        """It holds none."""
        del self._rows[row.number]

    def count(self, _work: StepWork) -> float:
        """A step was computed; it took no matter how long."""
        for row in self._rows.values():
            held = len(row.block_ids) * self._block_size
            waiting = max(0, row.num_prompt_tokens - row.num_computed)
            self.held += held
            self.waiting += waiting
            self.wasted += held - waiting - row.num_computed
        return 0.1


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-tokens", type=int, default=96, help="tokens of a step (default: %(default)s)")
    options = parser.parse_args()
    print(f"slots that rows hold, over all steps of at most {options.step_tokens} tokens")
    print("     with KV  rest of a begun prompt  wasted")
    for name in workloads.AT_ONCE:
        facts = FakeExecutor(num_blocks=2048, vocab_size=32_000, max_num_batched_tokens=options.step_tokens).facts
        config = SchedulerConfig(max_num_seqs=options.step_tokens, max_num_batched_tokens=options.step_tokens)
        slots = HeldSlots(facts.block_size)
        simulation = checked_simulation(facts, config, slots.count, slots)
        for prompt, num_output in workloads.build(name, 0):
            simulation.ask(0.0, len(prompt), num_output)
        simulation.run()
        waiting, wasted = slots.waiting / slots.held, slots.wasted / slots.held
        print(f"{name}  {1 - waiting - wasted:8.1%}  {waiting:22.1%}  {wasted:6.1%}")
    print("target: wasted under 4 % at W2's lengths")


if __name__ == "__main__":
    main()
