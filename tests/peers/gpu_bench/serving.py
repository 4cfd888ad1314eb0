"""The service as callers meet it: `penstock serve` with made-up weights, and `penstock bench` over loopback."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from cpu_bench.make_models import make_tokenizer
from cpu_bench.runners.penstock_service import service

from gpu_bench.figures import Figures, ServingFigures, StartFigures
from gpu_bench.sizes import Model, Sizes

OURS = "penstock"
# From the checkout, where nothing is installed.
PENSTOCK = (sys.executable, "-P", "-c", "import sys; from penstock.clients.cli.main import main; sys.exit(main())")


def measure(model: Model, sizes: Sizes) -> Iterator[Figures]:
    """Starts the service as often as is wanted, and sends the workload to the last one."""
    with _written(model) as folder:
        for start in range(sizes.starts):
            with service(str(folder), str(folder), _flags(sizes), PENSTOCK) as (_, address, _, seconds):
                yield StartFigures(model.name, "warm" if start else "first", seconds)
                if start == sizes.starts - 1:
                    yield _load(model, sizes, address, folder / "bench.json")


def measure_deterministic(model: Model, sizes: Sizes, ours_per_s: float | None) -> Iterator[ServingFigures]:
    """Sends the same to a service with --deterministic; ``ours_per_s`` is one's without."""
    with (
        _written(model) as folder,
        service(str(folder), str(folder), [*_flags(sizes), "--deterministic"], PENSTOCK) as (_, address, _, _),
    ):
        line = _load(model, sizes, address, folder / "bench.json")
        ratio = None if ours_per_s is None else ours_per_s / line.tokens_per_s
        yield replace(line, engine=f"{OURS} --deterministic", ratio=ratio)


@contextmanager
def _written(model: Model) -> Iterator[Path]:
    """What a service reads."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.write_config(folder)
        # Of the whole vocabulary: a service samples no ids that its tokenizer does not have.
        make_tokenizer(model.shape.vocab_size).save_pretrained(folder)
        yield folder


def _flags(sizes: Sizes) -> list[str]:
    workload = sizes.workload
    flags = ["--device", sizes.device, "--backend", "cuda", "--load-format", "dummy", "--speculative-config", "none"]
    flags += ["--max-model-len", str(workload.max_model_len), "--max-num-seqs", str(workload.concurrency)]
    if sizes.kv_cache_bytes is not None:
        flags += ["--kv-cache-memory-bytes", str(sizes.kv_cache_bytes)]
    return flags


def _load(model: Model, sizes: Sizes, address: str, out: Path) -> ServingFigures:
    workload = sizes.workload
    command = [
        *PENSTOCK, "bench", address, "--num-requests", workload.requests, "--concurrency", workload.concurrency,
        "--prompt-tokens", workload.prompt_tokens, "--output-tokens", workload.output_tokens,
        "--warmup", 8 * sizes.is_warmed, "--json", out,
    ]  # fmt: skip
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads(out.read_text())["summary"]
    if summary["requests"]["ok"] != workload.requests:
        raise RuntimeError(f"{summary['requests']} of {workload.requests} requests")
    times = summary["times_s"]
    return ServingFigures(
        model=model.name,
        engine=OURS,
        requests=workload.requests,
        concurrency=workload.concurrency,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        tokens_per_s=summary["output_tokens_per_s"],
        first_token_p50_s=times["ttft"]["p50"],
        first_token_p99_s=times["ttft"]["p99"],
        between_tokens_p50_s=times["itl"]["p50"],
        between_tokens_p99_s=times["itl"]["p99"],
        ratio=1.0,
    )
