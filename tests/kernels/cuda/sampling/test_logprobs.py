"""Log-probabilities against those of a sort in float64."""

import math

import pytest
import torch

from penstock.kernels.cuda.sampling.logprobs import MAX_TOP, logprobs, make_logprobs_workspace
from penstock.kernels.cuda.sampling.tensors import SamplerShape


def compute(shape, logits, num_top, token_ids):
    lines, device = len(num_top), logits.device
    padded = torch.full((lines + 1, shape.stride), math.nan, dtype=shape.dtype, device=device)
    padded[:lines, : shape.vocab_size] = logits
    room = make_logprobs_workspace(shape, lines + 1, device)
    for part in room.values():
        part.view(torch.uint8).fill_(0xA7)
    chosen = torch.full((lines + 1,), 7.0, device=device)
    top_ids = torch.full((lines + 1, MAX_TOP), -7, dtype=torch.int32, device=device)
    top = torch.full((lines + 1, MAX_TOP), 7.0, device=device)
    spare = [1 << 30]
    logprobs(
        shape,
        padded,
        torch.tensor([lines], dtype=torch.int32, device=device),
        torch.tensor(num_top + spare, dtype=torch.int32, device=device),
        torch.tensor(token_ids + spare, dtype=torch.int32, device=device),
        room,
        chosen,
        top_ids,
        top,
    )
    assert chosen[lines] == 7.0
    assert (top_ids[lines] == -7).all()
    assert (top[lines] == 7.0).all()
    return chosen[:lines].cpu(), top_ids[:lines].cpu(), top[:lines].cpu()


def check_lines(shape, logits, num_top):
    vocab_size = shape.vocab_size
    token_ids = torch.randint(vocab_size, (len(num_top),)).tolist()
    chosen, top_ids, top = compute(shape, logits, num_top, token_ids)
    expected = logits.cpu().double().log_softmax(-1)
    for line, (wanted, token_id) in enumerate(zip(num_top, token_ids, strict=True)):
        if wanted < 0:
            assert chosen[line] == 7.0
            assert (top_ids[line] == -7).all()
            continue
        order = torch.argsort(logits[line].cpu().float(), descending=True, stable=True)[:wanted]
        assert chosen[line] == pytest.approx(float(expected[line, token_id]), abs=1e-5, rel=1e-6)
        assert top_ids[line, :wanted].tolist() == order.tolist()
        torch.testing.assert_close(top[line, :wanted].double(), expected[line, order], atol=1e-5, rtol=1e-6)
        assert (top_ids[line, wanted:] == -7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [20, 1237])
def test_logprobs_are_those_of_a_sort(vocab_size, dtype, device):
    shape = SamplerShape(vocab_size, dtype, vocab_size + 3, 1, slice=256)
    logits = torch.randn(7, vocab_size) * 4
    logits[4] = logits[4].round()
    logits[5, 3:] = -math.inf
    logits[6] = 1e5
    check_lines(shape, logits.to(device, dtype), [-1, 0, 1, 5, 20, 20, 20])


def test_zero_and_minus_zero_are_equal(device):
    shape = SamplerShape(4, torch.float32, 5, 1, slice=16)
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0]], device=device)
    assert compute(shape, logits, [4], [0])[1][0, :4].tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_of_no_numbers_all_are_nan(logit, device):
    shape = SamplerShape(40, torch.float32, 48, 1, slice=16)
    logits = torch.randn(1, 40, device=device)
    logits[0, 30 if logit != -math.inf else slice(None)] = logit
    chosen, top_ids, top = compute(shape, logits, [5], [2])
    assert chosen[0].isnan()
    assert top[0, :5].isnan().all()
    assert top_ids[0, :5].tolist() == [0, 1, 2, 3, 4]


def test_bits_do_not_depend_on_other_lines(device):
    shape = SamplerShape(300, torch.float32, 300, 1, slice=128)
    logits = torch.randn(5, 300, device=device)
    together = compute(shape, logits, [3] * 5, [1] * 5)
    for line in range(5):
        alone = compute(shape, logits[line : line + 1], [3], [1])
        assert all(torch.equal(part[0], whole[line]) for part, whole in zip(alone, together, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128_256, 151_936])
def test_logprobs_of_real_vocabularies(vocab_size, device):
    shape = SamplerShape(vocab_size, torch.bfloat16, vocab_size, 1)
    check_lines(shape, (torch.randn(32, vocab_size) * 3).to(device, torch.bfloat16), [20] * 32)
