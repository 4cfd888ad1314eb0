"""The command ``penstock profile``: where the time of a model's steps goes on this machine's CPU."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

import msgspec
from tqdm import tqdm

from penstock.clients.cli.command_parser import CommandParser, positive
from penstock.clients.errors import PenstockError
from penstock.clients.host.cpu.thread_placement import CannotPin, place_threads
from penstock.clients.host.distribution import installed_version
from penstock.clients.host.machine import inspect_machine
from penstock.models.checkpoint.checkpoint import resolve_model
from penstock.models.errors import ModelError
from penstock.models.executor.step_profile import ProfiledLoad, ProfileJob, StepProfile, StepTime, profile_steps
from penstock.scheduler.worker_config import WorkerConfig
from penstock.service.config.serve_config import ServeConfig

_SERVE_FLAGS = ("dtype", "quantization", "kv_cache_dtype", "load_format", "cpu_pinning")
_BACKEND = "--backend cpu: "
"""The beginning of an error about a model that this backend cannot run."""
_EPILOG = """\
Loads the model as penstock serve does, measures what the machine reads and computes at best, and computes some prompts
and outputs. Prints for a step of decoding, and for the prompts, how long each stage took, its share of the time, and
its share of the limit: the time that its bytes take at the memory's bandwidth, or its operations at the arithmetic's
peak, whichever is longer. Run nothing else meanwhile. Only for CPUs. Exit status: 0, 1 if the model cannot be profiled,
2 for invalid flags.

examples:
  penstock profile                                        the built-in demo model
  penstock profile Qwen/Qwen3-0.6B --quantization int8    16 requests with 128 tokens of prompt
  penstock profile ./my-model --rows 1 --prompt-tokens 2000 --threads 4
  penstock profile ./my-model --load-format dummy --json - | jq '.steps[0].stages'
"""


def main(argv: list[str]) -> int:
    """Runs the command. Raises PenstockError if the model cannot be profiled."""
    arguments = make_parser().parse_args(argv)
    if arguments.output_tokens < 2:
        raise PenstockError("--output-tokens: must be at least 2, as the first token belongs to the prompt's step")
    try:
        job = _job(arguments)
        # Without a terminal, no progress is shown.
        with tqdm(bar_format="{desc} [{elapsed}]", file=sys.stderr, disable=None, leave=False) as bar:
            profile = profile_steps(job, bar.set_description_str)
    except (ModelError, CannotPin) as error:
        raise PenstockError(_explained(str(error))) from error
    # With --json -, standard output is only for the JSON.
    screen = sys.stderr if arguments.json == "-" else sys.stdout
    screen.write("\n".join([*describe(profile, job.load), ""]))
    if arguments.json is not None:
        about = {"format": 1, "penstock": installed_version(), "model": arguments.model}
        text = json.dumps({**about, "load": msgspec.to_builtins(job.load), **msgspec.to_builtins(profile)})
        if arguments.json == "-":
            sys.stdout.write(text + "\n")
        else:
            with open(arguments.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    return 0


def _explained(problem: str) -> str:
    """Names this command's flags in an error about the worker's configuration."""
    reason = problem.removeprefix(_BACKEND)
    if reason != problem:
        return f"only the CPU library counts the time of stages, and it cannot run this: {reason}"
    return problem.replace("--max-model-len", "--prompt-tokens plus --output-tokens")


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser("profile", "Shows where the time of a model's steps goes on this machine's CPU.", _EPILOG)
    fields = {field.name: field for field in dataclasses.fields(ServeConfig)}
    model = fields["model"]
    parser.add_argument("model", nargs="?", default=model.default, help=f"{model.metadata['help']} (default: demo)")
    as_served = parser.add_argument_group("the model, as in penstock serve")
    for name in _SERVE_FLAGS:
        field = fields[name]
        as_served.add_argument(
            f"--{name.replace('_', '-')}",
            choices=field.metadata["choices"],
            default=field.default,
            help=f"{field.metadata['help']} (default: {field.default})",
        )
    as_served.add_argument(
        "--threads", type=positive, metavar="N", help="compute threads (default: the cores that this process may use)"
    )
    load = parser.add_argument_group("requests")
    load.add_argument(
        "--rows", type=positive, default=16, metavar="N", help="requests that are computed together (default: 16)"
    )
    load.add_argument(
        "--prompt-tokens", type=positive, default=128, metavar="N", help="tokens of each prompt (default: 128)"
    )
    load.add_argument(
        "--output-tokens", type=positive, default=64, metavar="N", help="tokens of each output (default: 64)"
    )
    load.add_argument(
        "--rounds", type=positive, default=3, metavar="N", help="times that all this is computed (default: 3)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    return parser


def _job(arguments: argparse.Namespace) -> ProfileJob:
    """Returns what to measure. Raises ModelError and CannotPin."""
    machine = inspect_machine()
    load = ProfiledLoad(arguments.rows, arguments.prompt_tokens, arguments.output_tokens, arguments.rounds)
    num_threads = arguments.threads or machine.topology.num_threads()
    placement = place_threads(machine.topology, num_threads, arguments.cpu_pinning)
    worker = WorkerConfig(
        model=str(resolve_model(arguments.model, weights=arguments.load_format != "dummy").absolute()),
        device="cpu",
        backend="cpu",
        **{name: getattr(arguments, name) for name in _SERVE_FLAGS},
        num_threads=num_threads,
        thread_cpus=placement.cpus,
        thread_nodes=placement.nodes,
        num_blocks=load.rows * load.blocks_per_row,
        max_num_seqs=load.rows,
        max_model_len=load.prompt_tokens + load.output_tokens,
        max_memory_bytes=machine.available_bytes,
        log_level="warning",
    )
    return ProfileJob(worker, load)


def describe(profile: StepProfile, load: ProfiledLoad) -> Iterator[str]:
    """Yields the lines of the report."""
    rates = ", ".join(f"{rate / 1e9:,.0f} GOP/s in {name}" for name, rate in profile.operations_per_s.items())
    yield (
        f"{profile.weights} weights, KV cache in {profile.kv_cache_dtype}, {profile.instruction_set}, "
        f"{profile.threads} thread{'' if profile.threads == 1 else 's'}"
    )
    yield f"this machine reads {profile.bytes_per_s / 1e9:.1f} GB/s and computes {rates} at best"
    context = load.prompt_tokens + load.output_tokens / 2
    for step in profile.steps:
        if step.kind == "decode":
            what = f"a step of decoding, {load.rows} rows, context {context:.0f}"
        else:
            what = f"the prompts, {load.rows} of {load.prompt_tokens} tokens"
        yield ""
        yield f"{what}: {step.seconds * 1000:.2f} ms, {step.tokens / step.seconds:,.0f} tokens/s"
        yield from _table(step)


def _table(step: StepTime) -> Sequence[str]:
    lines = ["| stage | ms | of the time | of its limit | limited by |", "|---|---:|---:|---:|---|"]
    for stage in step.stages:
        reached = "" if stage.share_of_limit is None else f"{stage.share_of_limit:.0%}"
        lines.append(
            f"| {stage.name} | {stage.seconds * 1000:.3f} | {stage.share:.1%} | {reached} | {stage.limited_by or ''} |"
        )
    return lines
