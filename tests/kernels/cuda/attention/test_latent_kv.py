"""The writing of latents, against plain torch."""

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.cuda.latent_kv import LatentShape, latent_kv
from penstock.kernels.reference.ops import rotate

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [3, 200])
def test_latents_are_written_and_queries_rotated(heads, dtype, device):
    """Rows are slices of wider ones; a token without a slot writes nothing, nor does any other dimension change."""
    latent = LatentShape(q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20)
    tokens = 5
    first = torch.randn(tokens, latent.first_rows(heads), device=device).to(dtype)
    cached, queries = first[:, :32], first[:, 32:]
    angles = torch.randn(9, 4, device=device)
    positions = torch.tensor([3, 0, 8, 5, 1], dtype=torch.int32, device=device)
    slots = torch.tensor([17, 0, -1, 31, 40], device=device)
    weight = torch.rand(24, device=device) + 0.5
    query = torch.full((tokens, heads, 32), 7.0, device=device, dtype=dtype)
    pages = torch.full((3, 1, 1, 16, 32), 9.0, device=device, dtype=dtype)
    tables = angles.cos(), angles.sin()
    latent_kv(latent, cached, queries, *tables, positions, slots, weight, query, pages)

    rotation = tuple(table[positions] for table in tables)
    by_head = queries.view(tokens, heads, 20).float()
    wide = cached.float()
    normed = torch.nn.functional.rms_norm(wide[:, 8:], (24,), weight, 1e-6)
    vectors = torch.cat((rotate(wide[:, None, :8], *rotation)[:, 0], normed), dim=1)
    expected = torch.full((48, 32), 9.0, device=device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot] = vectors[token]
    tolerance = TOLERANCE[dtype]
    assert_close(pages.view(48, 32).float(), expected, atol=tolerance, rtol=tolerance)
    assert_close(query[..., :8].float(), rotate(by_head[..., :8], *rotation), atol=tolerance, rtol=tolerance)
    assert (query[..., 8:] == 7.0).all()
