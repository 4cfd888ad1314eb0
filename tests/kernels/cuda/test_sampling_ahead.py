"""The sampler's kernels are compiled for Hopper without a GPU, at the vocabulary of a real model."""

import os
import subprocess
import sys

MAX_SHARED_BYTES = 227 << 10

COMPILE = """
import torch
from penstock.kernels.cuda.acceptance import accept_variant
from penstock.kernels.cuda.logprobs import logprobs_variants
from penstock.kernels.cuda.sampling import sampling_variants
from penstock.kernels.cuda.sampling_rows import SamplerShape

shape = SamplerShape(151_936, torch.bfloat16, 151_936, 40_960)
for variant in (*sampling_variants(shape), *logprobs_variants(shape), accept_variant(shape)):
    print(variant.compile(90).metadata.shared)
"""


def test_all_variants_compile(tmp_path):
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE],
        env={**compiled, "TRITON_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    shared = [int(line) for line in done.stdout.split()]
    assert len(shared) == 11
    assert max(shared) <= MAX_SHARED_BYTES
