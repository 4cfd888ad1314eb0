"""What Triton makes of the attention kernels for Hopper, which takes no GPU, but a process without the interpreter."""

import json
import os
import subprocess
import sys

MAX_SHARED = 227 * 1024

COMPILE = """
import json, re
import torch
from penstock.kernels.cuda.attention_common import AttentionShape
from penstock.kernels.cuda.attention_decode import decode_variant
from penstock.kernels.cuda.attention_plan import DecodeShape
from penstock.kernels.cuda.attention_prefill import prefill_variant

bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
llama = AttentionShape(32, 8, 128, bf16, bf16, 0.1)
llama_fp8 = AttentionShape(32, 8, 128, bf16, fp8, 0.1)
variants = {
    "decoding": decode_variant(DecodeShape(llama, 1, deterministic=False)),
    "verification": decode_variant(DecodeShape(llama, 16, deterministic=False)),
    "decoding with fp8": decode_variant(DecodeShape(llama_fp8, 1, deterministic=False)),
    "prefill": prefill_variant(llama),
    "prefill with a window": prefill_variant(AttentionShape(4, 1, 256, bf16, bf16, 0.1, window=1024)),
}
for name, variant in variants.items():
    compiled = variant.compile(90)
    # Those that wait for a block's keys and values; the one behind a loop waits for no value, but for everything.
    waits = re.findall(r"async_wait %.*{num = (\\d+)", compiled.asm["ttgir"])
    print(json.dumps([name, compiled.metadata.shared, [int(wait) for wait in waits]]))
"""


def test_blocks_are_read_while_others_are_computed():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name, shared, waits in map(json.loads, printed.splitlines()):
        assert shared <= MAX_SHARED, name
        assert waits, name
        assert min(waits) >= 2, name  # keys and values of at least one more block are under way
    assert len(printed.splitlines()) == 5
