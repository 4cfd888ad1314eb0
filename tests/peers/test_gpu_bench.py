"""``make bench-gpu`` with tiny shapes, in Triton's interpreter: all of it runs, and its JSON has every key."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")  # it has wheels only for Linux

import torch
from gpu_bench.apart import Failed, Send, run_apart
from gpu_bench.figures import BASELINE, TABLES, VARIANTS, KernelFigures, LeftOut
from gpu_bench.kernels.cases import measure
from gpu_bench.kernels.latent import CASES as LATENT_CASES
from gpu_bench.kernels.launches import launch
from gpu_bench.sizes import TINY
from gpu_bench.variants import CHANGES

from penstock.kernels.cuda.activation import gated_activation_variant
from penstock.kernels.cuda.attention.plan import DecodeShape
from penstock.kernels.cuda.core import launch as launch_module
from penstock.models.backends.cuda.experts import ExpertLayers
from penstock.models.backends.cuda.linear import CudaLinears
from penstock.models.backends.cuda.product_choice import ProductChoice


@pytest.mark.soak
def test_everything_runs_with_tiny_shapes_and_has_every_key(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpu_bench", "--tiny", "--json", out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(out.read_text())
    assert set(lines) == {"about", *TABLES, "left_out"}
    assert {"date", "command", "tiny", "seconds", "device", "cuda", "torch", "triton", "transformers"} <= set(
        lines["about"]
    )
    for name, kind in TABLES.items():
        names = {field.name for field in fields(kind)}
        assert [set(line) for line in lines[name]] == [names] * len(lines[name])
        # Everything was measured in some line.
        assert {key for line in lines[name] for key, value in line.items() if value is not None} == names, name
    assert all(line["is_right"] for line in lines["kernels"] + lines["accuracy"])
    assert all(line["same_tokens"] for line in lines["deterministic"])
    fit = LeftOut("decode", "tiny float32 batch 2 context 96", "its KV does not fit")
    # Libraries are for GPUs.
    of_libraries = ("attention {", "fp8_product", "by_torch", "variants fa", "variants flashinfer")
    left_out = {f"{line['part']}: {line['what']}": line for line in lines["left_out"]}
    assert [line for name, line in left_out.items() if not any(part in name for part in of_libraries)] == [asdict(fit)]
    for engine in ("transformers static", "penstock --deterministic"):
        assert f"| tiny | {engine} |" in done.stdout
    assert "tiny float32 batch 2 context 96: its KV does not fit" in done.stdout


def test_a_part_that_takes_too_long_is_ended_and_its_lines_count() -> None:
    def work(send: Send) -> None:
        send({"a": 1})
        time.sleep(3600)  # longer than a test may take

    lines: list[dict[str, Any]] = []
    with pytest.raises(Failed, match=r"took more than its 3 s"):
        lines.extend(run_apart(work, 3.0))
    assert lines == [{"a": 1}]


def test_a_part_that_dies_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    def work(send: Send) -> None:
        send({"a": 1})
        raise RuntimeError("an illegal memory access")

    lines = run_apart(work, 60.0)
    assert next(lines) == {"a": 1}
    with pytest.raises(Failed, match=r"ended with status 1"):
        next(lines)
    assert "an illegal memory access" in capfd.readouterr().err


def test_launches_for_a_profiler_are_chosen_by_the_names_of_kernels() -> None:
    launched = launch(["rms", "prep"], TINY)
    assert launched == ["rms_norm: 3 tokens", "prepare, commit: 2 rows"]


def test_tiles_of_latent_attention_are_right() -> None:
    [line] = measure(LATENT_CASES[-1:], TINY.latents, TINY, None)
    assert isinstance(line, KernelFigures), line
    assert line.is_right


def test_a_variant_changes_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[Any, str]] = [
        (CudaLinears, "measure"), (ExpertLayers, "measure"), (ProductChoice, "is_torchs"),
        (launch_module, "PDL_CAPABILITY"), (DecodeShape, "is_merged_by_last"), (DecodeShape, "extended"),
    ]  # fmt: skip
    for owner, name in changed:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # and so they are put back
    shape = DecodeShape(replace(TINY.models[0].shape.attention_of(None), head_dim=128), 1)
    early = gated_activation_variant(torch.bfloat16, 8, "silu")

    def is_early() -> Any:
        return early._for_capability(90)[0]["PDL"]

    assert (is_early(), ProductChoice().is_torchs(8, 8, 1)) == (True, False)
    assert shape.is_merged_by_last
    assert shape.extended is not None
    assert tuple(CHANGES) == VARIANTS
    CHANGES[BASELINE].apply()
    assert is_early()
    for name in ("products by cuBLAS", "late launches", "a kernel that merges", "undivided turns"):
        CHANGES[name].apply()
    assert (is_early(), ProductChoice().is_torchs(8, 8, 1)) == (False, True)
    assert not shape.is_merged_by_last
    assert shape.extended is None
    with pytest.raises(ModuleNotFoundError) as missing:
        CHANGES["flashinfer"].apply()
    assert missing.value.name == "flashinfer"
