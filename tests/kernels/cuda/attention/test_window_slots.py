"""Where tokens are stored in layers with windows, against the tables."""

import torch

from penstock.kernels.cuda.step import StepTensors
from penstock.kernels.cuda.window_slots import find_window_slots

PAGE_SLOTS = 16
NUM_GROUPS, NUM_ROWS, NUM_PAGES = 2, 4, 3


def test_each_group_has_its_slots(device):
    """Of three sequences and two tokens that pad the step; one token has no page, and is stored nowhere."""

    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    tables = torch.randperm(NUM_GROUPS * NUM_ROWS * NUM_PAGES, generator=torch.Generator().manual_seed(1))
    tables = tables.view(NUM_GROUPS, NUM_ROWS, NUM_PAGES).to(device, torch.int32)
    rows, positions = [2, 0, 3], [14, 15, 16, 17, 0, 40, 41, 0, 0]
    owners = [0, 0, 0, 0, 1, 2, 2]
    step = StepTensors(
        rows=ints(*rows),
        num_queries=ints(4, 1, 2),
        given=ints(*[0] * 9),
        token_ids=ints(*[0] * 9),
        positions=ints(*positions),
        slots=ints(*range(6), -1, -1, -1, dtype=torch.int64),
        query_starts=ints(0, 4, 5, 7),
        contexts=ints(18, 1, 42),
    )
    found = torch.full((NUM_GROUPS, 12), -7, dtype=torch.int64, device=device)
    find_window_slots(step, tables, PAGE_SLOTS, found)
    for pages, slots in zip(tables.tolist(), found.tolist(), strict=True):
        expected = [
            pages[rows[owner]][position // PAGE_SLOTS] * PAGE_SLOTS + position % PAGE_SLOTS
            for owner, position in zip(owners[:6], positions, strict=False)
        ]
        assert slots == [*expected, -1, -1, -1, -7, -7, -7]
