"""The CPU library on emulated Arm processors. `make emulate` runs all tests of kernels there; these are some of them."""

import fcntl
import os
import subprocess
from pathlib import Path

import arm64
import pytest

SOME_TESTS = {
    "test_cpu_products.py": "test_products_are_right or bits_depend or rounding or comes_back",
    "test_cpu_quantized.py": "are_those_of_the_rounded or any_number_of_rows or codes_are_kept or overflow",
    "test_cpu_elementwise.py": "",
    "test_cpu_attention.py": "float64 and 2-2 or first_slot or a_page_holds",
    "test_cpu_program.py": "dense",
    "test_cpu_sampling.py": "filters_leave or give_way or of_a_prompt or own and 300",
}
"""Of each file: those that cover every format and every kernel in seconds."""


@pytest.fixture(scope="session")
def arm_library() -> Path:
    try:
        return arm64.prepare(quick=True)
    except arm64.Unavailable as reason:
        pytest.skip(str(reason))
