"""``tests/gpu_run.sh`` and the service on a machine with few packages, which a hook of imports makes of this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")  # it has wheels only for Linux

from without_gpu.bare_machine import write_sitecustomize

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")

SCRIPT = Path(__file__).with_name("gpu_run.sh")
STAGES = {
    "right": ["facts", "compile", "tests", "kernels"],
    "fast": ["steps", "service"],
    "whole": ["small_service", "system", "memcheck", "racecheck"],
    "why": ["counters", "peers", "variants"],
}
# Takes the place of Python and writes down what it is to run.
NOTES = """#!/bin/sh
echo "$@" >>"$0.log"
"""


def gpu_run(out: Path, *words: str, **environment: str) -> list[str]:
    """Runs the script. Returns the names of the steps that it started, in order."""
    subprocess.run(
        [SCRIPT, *words], env={**os.environ, "OUT": str(out), **environment}, check=True, stdout=subprocess.DEVNULL
    )
    return [line.partition(":")[0] for line in (out / "summary.txt").read_text().splitlines()]


def test_every_stage_runs_its_steps(tmp_path):
    python = tmp_path / "python"
    python.write_text(NOTES)
    python.chmod(0o755)
    found = gpu_run(tmp_path / "out", *STAGES, PYTHON=str(python), SITE=str(tmp_path / "site"))
    steps = [step for stage in STAGES.values() for step in stage]
    assert [name for name in found if name != "wheels"] == ["version", *steps]
    commands = (tmp_path / "python.log").read_text()
    for words in ("penstock.kernels.aot", "-n 14", "--parts ceilings kernels", "--parts serving", "test_host_tier.py"):
        assert words in commands


def test_an_unknown_stage_is_refused(tmp_path):
    done = subprocess.run([SCRIPT, "slow"], env={**os.environ, "OUT": str(tmp_path)}, check=False, capture_output=True)
    assert done.returncode == 2
    for name in STAGES:
        assert f"gpu_run.sh {name} " in done.stderr.decode()
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with which PYTHONPATH begins on a machine with few packages."""
    folder = tmp_path_factory.mktemp("bare")
    hidden = write_sitecustomize(folder)
    assert {"fastapi", "jsonschema", "hypothesis", "opentelemetry.sdk"} <= hidden
    assert not {"torch", "triton", "transformers", "grpc", "google.protobuf", "opentelemetry.trace"} & hidden
    return folder


def test_the_service_gets_as_far_as_the_driver(bare):
    serve = "import sys; from penstock.clients.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", serve, "serve", "demo", "--device", "cuda", "--listen", "127.0.0.1:0"],
        env={**os.environ, "PYTHONPATH": str(bare)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "--device cuda: " in done.stderr, done.stdout + done.stderr
    assert "No module named" not in done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_step_starts_on_a_bare_machine(bare, tmp_path, monkeypatch):
    """Its tests are only collected, and its benchmarks fail for want of a GPU, but not of a package."""
    monkeypatch.delenv("TRITON_INTERPRET")
    found = gpu_run(
        tmp_path, *STAGES, PYTHON=sys.executable, SITE=str(bare), COMPILE_MODELS="Qwen3-0.6B",
        PYTEST_ADDOPTS="--collect-only",
    )  # fmt: skip
    assert set(found) >= {step for stage in STAGES.values() for step in stage}
    # Some packages in the environment of the tests have entry points that need others.
    lines = (tmp_path / "run.log").read_text().splitlines()
    log = "\n".join(line for line in lines if "trying to load entry-point" not in line)
    assert "No module named" not in log
    assert "errors during collection" not in log
    for name in ("kernels", "steps", "service", "small_service", "peers", "variants"):
        left_out = json.loads((tmp_path / f"{name}.json").read_text())["left_out"]
        assert left_out
        missing = {each["part"] for each in left_out if "is not installed" in each["why"]}
        assert missing <= {"variants flashinfer", "variants fa"}
