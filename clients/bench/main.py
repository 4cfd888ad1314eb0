"""``penstock bench``: measures latency and throughput of a running service."""

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from penstock.clients.bench.flags import parse_arguments
from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.plot import plot
from penstock.clients.bench.report import Report
from penstock.clients.bench.runner import BenchProgress, run
from penstock.clients.bench.table import table
from penstock.clients.bench.target import BenchTarget
from penstock.clients.bench.trace import TraceReader
from penstock.clients.bench.workload import RandomLoad, WarmUp, Workload
from penstock.clients.cli.options import advised, connection, default_target
from penstock.clients.client import AsyncClient
from penstock.clients.errors import PenstockError
from penstock.clients.host.distribution import installed_version
from penstock.clients.host.event_loop import loop_factory

_INTERRUPTED = 130


@dataclass(frozen=True)
class _Service:
    """The service under test."""

    caller: BenchTarget
    target: str
    model: str
    vocab_size: int
    max_model_len: int | None


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = parse_arguments(argv)
    _check_files(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        report, about = runner.run(_bench(arguments))
    if report is None:
        print("interrupted during warm-up", file=sys.stderr)
        return _INTERRUPTED
    _write_report(arguments, report, about)
    if report.was_stopped:
        return _INTERRUPTED
    return 0 if report.ok else 1


async def _bench(arguments: argparse.Namespace) -> tuple[Report | None, dict[str, Any]]:
    """Returns the report (None if the run was stopped before it began) and a description of the run."""
    # Records accumulate, and a full garbage collection would delay all requests at once.
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    stop = _stop_on_signals()
    async with _service(arguments) as service:
        load = _load(arguments, service)
        about = {
            "api": arguments.api,
            "target": service.target,
            "model": service.model,
            "load": str(load),
            "options": arguments.options,
        }
        if arguments.warmup:
            warm_up = WarmUp(load, arguments.warmup, service.vocab_size)
            if (await run(warm_up, service.caller, stop=stop)).was_stopped:
                return None, about
        with _progress(arguments, load) as on_progress:
            report = await run(
                load,
                service.caller,
                duration_s=arguments.duration,
                max_outstanding=arguments.max_outstanding,
                stop=stop,
                on_progress=on_progress,
            )
    return report, about


def _load(arguments: argparse.Namespace, service: _Service) -> Workload:
    if arguments.trace is not None:
        reader = TraceReader(
            vocab_size=service.vocab_size,
            arrivals=arguments.arrivals,
            max_requests=arguments.num_requests,
            seed=arguments.seed,
            options=arguments.options,
        )
        return reader.read(arguments.trace)
    return RandomLoad(
        vocab_size=service.vocab_size,
        arrivals=arguments.arrivals,
        num_requests=arguments.num_requests,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        prefix_tokens=arguments.prefix_tokens,
        num_prefixes=arguments.prefixes,
        turns=arguments.turns,
        seed=arguments.seed,
        options=arguments.options,
        max_model_len=service.max_model_len,
    )


@asynccontextmanager
async def _service(arguments: argparse.Namespace) -> AsyncIterator[_Service]:
    """Connects to the service. Raises PenstockError if it cannot be reached."""
    timeout_s = None if arguments.timeout_ms is None else arguments.timeout_ms / 1000
    if arguments.api == "openai":
        async with _openai_service(arguments, timeout_s) as service:
            yield service
        return
    where = connection(arguments, arguments.target or default_target())
    async with AsyncClient(where.target, api_key=where.api_key, tls=where.tls) as client:
        with advised():
            model = await client.model()
    if arguments.model and arguments.model != model.name:
        raise PenstockError(f"--model: {where.target} serves {model.name}, not {arguments.model}")
    vocab_size = arguments.vocab_size or model.vocab_size
    num_streams, resend = arguments.streams, arguments.resend_context
    async with GrpcCaller(where, num_streams=num_streams, timeout_s=timeout_s, resend_context=resend) as caller:
        yield _Service(caller, where.target, model.name, vocab_size, model.max_model_len or None)


@asynccontextmanager
async def _openai_service(arguments: argparse.Namespace, timeout_s: float | None) -> AsyncIterator[_Service]:
    # Imported here: the bare install has no aiohttp.
    from penstock.clients.bench.openai_target import DEFAULT_ENDPOINT, OpenAiCaller

    where = connection(arguments, arguments.target or "http://127.0.0.1:8000")
    named, endpoint = arguments.model or "", arguments.endpoint or DEFAULT_ENDPOINT
    async with OpenAiCaller(where, model=named, endpoint=endpoint, timeout_s=timeout_s) as caller:
        model, max_model_len = await caller.model()
        yield _Service(caller, where.target, model, arguments.vocab_size, max_model_len)


@contextmanager
def _progress(arguments: argparse.Namespace, load: Workload) -> Iterator[Callable[[BenchProgress], object]]:
    """Shows a progress bar on a terminal, of requests, or of seconds if the number of requests is unlimited."""
    counts = load.num_requests is not None
    total = load.num_requests if counts else arguments.duration
    form = "{l_bar}{bar}| {n:.0f}/{total:.0f}{unit} [{elapsed}<{remaining}{postfix}]"
    bar = tqdm(
        total=total,
        unit=" requests" if counts else " s",
        file=sys.stderr,
        disable=None,
        dynamic_ncols=True,
        bar_format=form,
    )
    with bar:

        def show(progress: BenchProgress) -> None:
            elapsed = bar.format_dict["elapsed"]
            bar.n = progress.ended if counts else min(elapsed, arguments.duration)
            rate = progress.output_tokens / max(elapsed, 1e-3)
            failed = f", {progress.failed:,} failed" if progress.failed else ""
            bar.set_postfix_str(f"{progress.running:,} running, {rate:,.0f} tokens/s{failed}", refresh=False)
            bar.update(0)
            bar.refresh()

        # Without a terminal, progress costs nothing.
        yield show if not bar.disable else lambda progress: None


def _stop_on_signals() -> asyncio.Event:
    """Returns an event that the first Ctrl-C or SIGTERM sets; a second Ctrl-C ends the program as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    return stop


def _write_report(arguments: argparse.Namespace, report: Report, about: dict[str, Any]) -> None:
    """Writes the requested outputs. Raises OSError."""
    summary = report.summary(arguments.slo)
    title = f"{about['model']} at {about['target']} ({about['api']}): {about['load']}"
    # With --json -, standard output is only for the JSON.
    screen: IO[str] = sys.stderr if arguments.json == "-" else sys.stdout
    print(f"{title}\n\n{table(summary)}", file=screen)
    if arguments.json is not None:
        head = {"format": 1, "penstock": installed_version(), "date": datetime.now(UTC).isoformat()}
        text = json.dumps({**head, **about, "summary": summary, "requests": report.requests()})
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n")
    if arguments.plot is not None:
        plot(report, title, arguments.plot, arguments.slo)


def _check_files(arguments: argparse.Namespace) -> None:
    """Checks before the run that the output files can be written. Raises PenstockError."""
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path in (None, "-"):
            continue
        if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
            raise PenstockError(f"{flag}: cannot write {path}")
    if arguments.plot is not None:
        import matplotlib  # noqa: F401 - not in the bare install
