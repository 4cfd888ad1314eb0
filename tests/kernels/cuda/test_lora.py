"""The products of adapters against torch."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.lora import TILE, LoraTiles, add_lora

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
ENDS = ((40,), (64, 96, 128), (48, 96))


def tiles_of(slots, device):
    """The tiles of tokens with these slots, and two empty ones."""
    tokens, of_tiles = [], []
    for slot in sorted({slot for slot in slots if slot}):
        found = [token for token, own in enumerate(slots) if own == slot]
        for begin in range(0, len(found), TILE):
            part = found[begin : begin + TILE]
            tokens += part + [-1] * (TILE - len(part))
            of_tiles.append(slot)
    tokens += [-1] * 2 * TILE
    of_tiles += [0, 0]
    return LoraTiles(*(torch.tensor(values, dtype=torch.int32, device=device) for values in (tokens, of_tiles)))


def check_added(num_tokens, columns, ends, rank, dtype, device, num_slots=3):
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, out = random(num_tokens, columns), random(num_tokens, ends[-1])
    a, b = random(num_slots, len(ends) * rank, columns) * columns**-0.5, random(num_slots, ends[-1], rank)
    slots = torch.randint(0, num_slots + 1, (num_tokens,), generator=generator).tolist()
    expected = out.double()
    for token, slot in enumerate(slots):
        begin = 0
        for part, end in enumerate(ends if slot else ()):
            inner = x[token].double() @ a[slot - 1, part * rank : (part + 1) * rank].double().T
            expected[token, begin:end] += inner.to(dtype).double() @ b[slot - 1, begin:end].double().T
            begin = end
    before = out.clone()
    add_lora(x, a, b, ends, tiles_of(slots, device), out)
    assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * rank)
    untouched = [token for token, slot in enumerate(slots) if not slot]
    assert torch.equal(out[untouched], before[untouched])
    return x, a, b, slots, before, out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("rank", [1, 16, 20])
def test_adapters_are_added(rank, ends, dtype, device):
    check_added(21, 72, ends, rank, dtype, device)


def test_a_tokens_bits_do_not_depend_on_the_others(device):
    x, a, b, slots, before, out = check_added(40, 144, (64, 96, 128), 16, torch.bfloat16, device)
    for token in (0, 7, 39):
        alone = before[token : token + 1].clone()
        add_lora(x[token : token + 1].clone(), a, b, (64, 96, 128), tiles_of(slots[token : token + 1], device), alone)
        assert torch.equal(alone[0], out[token])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "rank"), [(1, 16), (64, 16), (2048, 64), (64, 256)])
def test_adapters_at_size(tokens, rank, dtype, device):
    check_added(tokens, 4096, (4096, 5120, 6144), rank, dtype, device)
