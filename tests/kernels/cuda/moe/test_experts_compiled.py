"""What Triton makes of the experts' product for Hopper, which takes no GPU, but a process without the interpreter."""

import json
import os
import subprocess
import sys

COMPILE = """
import json, re
from penstock.kernels.cuda.moe.gemm import gate_up_variant
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.kernels.cuda.example_shapes import SHAPES

model = SHAPES["Qwen3-30B-A3B"]
shape = ExpertsShape.of(model)
for tiles in shape.all_tiles:
    made = gate_up_variant(shape, tiles).compile(90).asm
    waits = [int(wait) for wait in re.findall(r"async_wait %.*{num = (\\d+)", made["ttgir"])]
    print(json.dumps([tiles.block_m, waits, "wgmma.mma_async" in made["ptx"], made["ttgir"].count("convert_layout")]))
"""


def test_blocks_are_read_while_others_are_multiplied(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-P", "-c", COMPILE]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = [json.loads(line) for line in printed.splitlines()]
    assert [block_m for block_m, *_ in found] == [16, 64, 128]
    for block_m, waits, on_matrix_units, conversions in found:
        assert waits, block_m
        assert min(waits) >= 4, block_m  # rows and weights of at least two more blocks are under way
        assert on_matrix_units == (block_m >= 64)
        assert conversions <= 1  # of the result, to be stored: gate and up meet where they are
