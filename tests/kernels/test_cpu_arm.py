"""The CPU library on emulated Arm processors: a part of the kernels' tests, of which `make emulate` runs all. The
processor `max` has every instruction set, so a single run tests all of them."""

import subprocess
from pathlib import Path

import pytest
from arm import emulator

SOME_TESTS = {
    "products": "(right_for_every_number and 77) or nearest_even or what_is_not_finite",
    "quantized": "(rounded_numbers and 136) or (codes_are_kept and 130) or extremes or int8_codes",
    "elementwise": "",
    "attention": "(float64 and 2-2) or (holds_what and 18)",
    "program": "dense and not is_what_numpy",
    "sampling": "filters_leave or nothing_give_way or of_a_prompt",
}
"""By file, the tests that together run every kernel for every format in a few seconds."""


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


@pytest.mark.parametrize(("name", "expression"), SOME_TESTS.items(), ids=SOME_TESTS)
def test_kernels_on_arm(arm_library: Path, name: str, expression: str) -> None:
    file = f"tests/kernels/test_cpu_{name}.py"
    chosen = f"neon and ({expression})" if expression else "neon"
    printed = run("max", arm_library, emulator.pytest_command("max", file, "-k", chosen))
    assert " passed" in printed
    assert "skipped" not in printed
