"""The CPU library on emulated Arm processors: a part of the kernels' tests, of which `make emulate` runs all. The
processor `max` has every instruction set, so a single run tests all of them."""

import re
import subprocess
from pathlib import Path

import pytest
from arm import emulator

FILES = sorted({*Path(__file__).parent.glob("test_cpu_*.py")} - {Path(__file__)})
"""Those of `make emulate`. A file that needs torch cannot be imported there."""
SOME_TESTS = (
    "right_for_every_number and 17-77",
    "rounding_is_to_the_nearest_even",
    "rounded_numbers and 53-136",
    "codes_are_kept and 130",
    "int8_codes_are_kept",
    "extremes_of_codes",
    "rms_norm",
    "gated_product and 35",
    "test_activate",
    "rotate",
    "float64 and 2-2 and 2048",
    "a_page_holds and 18",
    "one_wanted_position and neon_bf16",
    "penalties_round",
    "nothing_give_way",
    "logprobs_of_a_prompt and 40",
    "test_convolution",
    "test_scan and 24",
)
"""Tests that together run every kernel for every format in a few seconds."""


@pytest.fixture(scope="module")
def arm_library() -> Path:
    try:
        return emulator.prepare(quick=True)
    except emulator.Unavailable as reason:
        pytest.skip(str(reason))


def run(processor: str, library: Path, command: list[str]) -> str:
    """What an emulated Python prints."""
    done = subprocess.run(
        command,
        env=emulator.environment(processor, library),
        cwd=emulator.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("processor", "levels"), emulator.PROCESSORS.items(), ids=emulator.PROCESSORS)
def test_a_processor_has_the_levels_that_it_can_run(arm_library: Path, processor: str, levels: tuple[str, ...]) -> None:
    command = emulator.command(processor, "-m", "penstock.kernels.cpu.isa_report")
    assert tuple(run(processor, arm_library, command).split()) == levels


def test_kernels_on_arm(arm_library: Path) -> None:
    chosen = " or ".join(f"({words})" for words in SOME_TESTS)
    printed = run("max", arm_library, emulator.pytest_command("max", *map(str, FILES), "-k", chosen))
    [num_passed] = re.findall(r"^(\d+) passed", printed, re.MULTILINE)
    assert int(num_passed) > 100
    assert "skipped" not in printed
