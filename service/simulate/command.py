"""The command ``penstock simulate``: predicts what a load would be like for replicas of a service."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec
from tqdm import tqdm

from penstock.clients.bench.plot import plot
from penstock.clients.bench.table import table
from penstock.clients.bench.trace import Trace, TraceReader
from penstock.clients.errors import PenstockError
from penstock.clients.host.distribution import install_command, installed_version
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.simulation.costs import MESSAGE_S, REQUEST_S
from penstock.scheduler.simulation.fit import Fit, fit_costs
from penstock.scheduler.simulation.simulation import Routing
from penstock.scheduler.simulation.step_log import StepLogError, read_step_log
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.simulate.flags import parse_arguments
from penstock.service.simulate.plot import plot_sweep
from penstock.service.simulate.run import SimulatedRun, simulate
from penstock.service.simulate.settings import RATE, SETTINGS, SimulatedService
from penstock.service.simulate.sweep import choose, configurations, describe_choice, sweep_table

JSON_FORMAT = 1
NOT_MET = 3
"""The exit status if no configuration of a sweep meets the SLOs."""
_MANY_TIMES = 1.25
"""Costs of steps with more work than this factor times that of the log are extrapolated."""
_NO_FACTS = WorkerFacts(
    num_blocks=1, block_size=16, vocab_size=1 << 30, max_model_len=1, max_num_seqs=256, max_num_batched_tokens=2048,
    architecture="", backend="", device="", dtype="", kv_cache_dtype="", weight_bytes=0, kv_bytes=0,
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status. Raises PenstockError if a file cannot be used."""
    arguments = parse_arguments(argv)
    _check_files(arguments)
    service, fit = _service(arguments)
    trace = _trace(arguments, service)
    services = configurations(service, arguments.sweep) if arguments.sweep else [service]
    timeout_s = None if arguments.timeout_ms is None else arguments.timeout_ms / 1000
    with _progress(trace.num_requests * len(services)) as on_end:
        runs = [simulate(each, trace, timeout_s=timeout_s, seed=arguments.seed, on_end=on_end) for each in services]
    return _report(arguments, trace, runs, fit)


def _service(arguments: argparse.Namespace) -> tuple[SimulatedService, Fit | None]:
    """Returns what the flags and the log describe. Raises PenstockError."""
    fit = None
    if arguments.step_log is None:
        costs, facts, limits = arguments.step_cost.simulated, _NO_FACTS, SchedulerConfig(explain_requests=0)
    else:
        try:
            log = read_step_log(arguments.step_log)
        except StepLogError as error:
            raise PenstockError(f"--step-log: {error}") from None
        try:
            fit = fit_costs(log)
        except StepLogError as error:
            raise PenstockError(f"--step-log: {arguments.step_log} {error}") from None
        costs, facts = fit.costs, log.header.facts
        limits = SchedulerConfig(**msgspec.structs.asdict(log.header.limits), explain_requests=0)
    if arguments.network is not None:
        parts = {name: arguments.network / 1000 * s / (REQUEST_S + MESSAGE_S) for name, s in _NETWORK.items()}
        costs = replace(costs, service=replace(costs.service, **parts))
    if arguments.max_model_len is not None:
        facts = msgspec.structs.replace(facts, max_model_len=arguments.max_model_len)
    if arguments.enable_prefix_caching is not None:
        limits = replace(limits, enable_prefix_caching=arguments.enable_prefix_caching)
    service = SimulatedService(
        facts, limits, costs, routing=Routing(arguments.routing), hop_s=arguments.stage_hop / 1000
    )
    for name, setting in SETTINGS.items():
        value = getattr(arguments, name.replace("-", "_")) if name != RATE else None
        if value is not None:
            service = setting.apply(service, value)
    return service, fit


_NETWORK = {"request_s": REQUEST_S, "message_s": MESSAGE_S}


def _trace(arguments: argparse.Namespace, service: SimulatedService) -> Trace:
    """Reads the load. Raises PenstockError."""
    reader = TraceReader(
        vocab_size=service.facts.vocab_size,
        arrivals=arguments.arrivals,
        max_requests=arguments.num_requests,
        seed=arguments.seed,
        options={},
        max_model_len=service.facts.max_model_len,
        argument="TRACE",
    )
    return reader.read(arguments.trace)


def _check_files(arguments: argparse.Namespace) -> None:
    """Checks before the run that the output files can be written. Raises PenstockError."""
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path in (None, "-"):
            continue
        if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
            raise PenstockError(f"{flag}: cannot write {path}; give a file in a directory that exists")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise PenstockError(f"--plot: needs matplotlib, which is not installed; install it: {install_command('bench')}")


@contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[], object]]:
    """Shows a progress bar on a terminal. Yields what is called when a request has ended."""
    form = "{l_bar}{bar}| {n_fmt}/{total_fmt} requests [{elapsed}<{remaining}]"
    bar = tqdm(total=num_requests, file=sys.stderr, disable=None, leave=False, bar_format=form, mininterval=0.2)
    with bar:
        yield bar.update if not bar.disable else lambda: None


def _report(arguments: argparse.Namespace, trace: Trace, runs: Sequence[SimulatedRun], fit: Fit | None) -> int:
    """Writes the requested outputs; returns the exit status. Raises OSError."""
    slo = arguments.slo
    # With --json -, standard output is only for the JSON.
    screen: IO[str] = sys.stderr if arguments.json == "-" else sys.stdout
    choices = list(choose(runs, slo, arguments.slo_share)) if slo is not None and arguments.sweep else []
    parts = [_title(arguments, trace, runs[0], fit)]
    if arguments.sweep:
        parts.append(sweep_table(runs, slo))
        is_swept = RATE in arguments.sweep
        described = [describe_choice(each, slo, arguments.slo_share, is_swept=is_swept) for each in choices]
        parts.append("\n".join(described))
    else:
        parts += [table(runs[0].summary(slo)), "\n".join(_load(runs[0]))]
    parts.append("\n".join(_warnings(runs, fit)))
    screen.write("\n\n".join(filter(None, parts)) + "\n")
    if arguments.json is not None:
        about = {"format": JSON_FORMAT, "penstock": installed_version(), "date": datetime.now(UTC).isoformat()}
        content = {**about, "load": str(trace), **_content(runs, fit, arguments), "cheapest": [
            {"rate": each.rate, "is_met": each.is_met, "share": each.share, "failing": dict(each.failing),
             "settings": _settings(each.run.service)} for each in choices
        ]}  # fmt: skip
        text = json.dumps(content) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.json).write_text(text)
    if arguments.plot is not None:
        if arguments.sweep:
            plot_sweep(runs, str(trace), arguments.plot, slo)
        else:
            plot(runs[0].report, f"simulated: {trace}", arguments.plot, slo)
    if choices and not all(each.is_met for each in choices):
        return NOT_MET
    return 0 if any(run.report.ok for run in runs) else 1


def _title(arguments: argparse.Namespace, trace: Trace, run: SimulatedRun, fit: Fit | None) -> str:
    source = "--step-cost"
    if fit is not None:
        source = f"{arguments.step_log.name}: {fit.num_steps:,} steps, with a median error of {fit.median_error:.1%}"
    service = "" if arguments.sweep else f"\n{run.service}"
    return f"simulated: {trace}{service}\ncosts of steps from {source}"


def _load(run: SimulatedRun) -> Iterator[str]:
    """Yields the lines below the table of a single run."""
    yield f"KV cache      {run.mean_kv:.0%} held on average, {run.most_kv:.0%} at most; {run.preemptions:,} preemptions"
    yield f"workers       busy {run.busy_share:.0%} of the time, in {run.steps:,} steps"
    yield f"simulated in  {run.wall_s:.2f} s, {run.report.seconds / run.wall_s:,.0f} times as fast as it would run"


def _warnings(runs: Sequence[SimulatedRun], fit: Fit | None) -> Iterator[str]:
    if fit is not None:
        tokens, rows = max(run.most_tokens for run in runs), max(run.most_rows for run in runs)
        for name, most, known in (("tokens", tokens, fit.most_tokens), ("decoding rows", rows, fit.most_rows)):
            if most > _MANY_TIMES * known:
                yield (
                    f"WARNING: steps have up to {most:,} {name}, and those of the log at most {known:,}, so that their "
                    "times are extrapolated. Log a larger load."
                )
    if not any(run.report.ok for run in runs):
        yield "WARNING: no request was answered."


def _settings(service: SimulatedService) -> dict[str, Any]:
    """Returns a service's settings as plain data."""
    limits = {
        name: value for name, value in asdict(service.limits).items() if name not in ("tenants", "default_tenant")
    }
    return {
        "replicas": service.replicas,
        "pipeline_parallel_size": service.stages,
        "routing": service.routing.value,
        "rate": service.rate,
        "kv_cache_tokens": service.facts.num_kv_tokens,
        "max_model_len": service.facts.max_model_len,
        **limits,
        "policy": service.limits.policy.value,
    }


def _content(runs: Sequence[SimulatedRun], fit: Fit | None, arguments: argparse.Namespace) -> dict[str, Any]:
    costs = runs[0].service.costs
    fitted = None if fit is None else {"steps": fit.num_steps, "median_error": fit.median_error}
    content: dict[str, Any] = {
        "step_costs_s": costs.step._asdict(),
        "service_costs_s": asdict(costs.service),
        "fit": fitted,
        "runs": [{"settings": _settings(run.service), "summary": run.summary(arguments.slo)} for run in runs],
    }
    if len(runs) == 1:
        content["requests"] = runs[0].report.requests()
    return content
