"""``penstock generate``: runs a file of requests and writes a file of results; can be interrupted at any time and
resumed."""

import argparse
import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from penstock.clients.cli.batch_files import FileResults, Results, StreamResults
from penstock.clients.cli.batch_gateway import BatchGateway
from penstock.clients.cli.batch_run import BatchRun
from penstock.clients.cli.command_parser import CommandParser, positive
from penstock.clients.cli.options import ConnectionOptions, add_connection_flags, add_setting_flag, advised, connection
from penstock.clients.client import AsyncClient
from penstock.clients.constraints import add_constraint_flags, constraint_settings
from penstock.clients.errors import PenstockError

_LONGEST_LINE = 64 << 20

_EPILOG = """\
input line:  {"id": 1, "prompt": "Once upon a time", "max_tokens": 50, "temperature": 0}
             with prompt, prompt_token_ids or messages, and options named as in the protos
output line: {"id": 1, "text": "...", "token_ids": [...], "finish_reason": "stop", "usage": {...}}
             or {"id": 1, "error": {"code": "INVALID_ARGUMENT", "message": "..."}}, in the order in which requests end

A line in the format of OpenAI's Batch API gets a result in that format (needs the extra 'gateway'):
             {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Run the same command again to resume: ids that are already in OUT are skipped.
Exit status: 0 if every line was answered, 1 if a line failed or the job could not continue, 2 for invalid arguments,
130 if it was interrupted.

examples:
  penstock generate demo --input in.jsonl --output out.jsonl
  penstock generate --target 127.0.0.1:50051 --input in.jsonl --output out.jsonl --set max_tokens=100
  penstock generate demo --input in.jsonl --output out.jsonl --json-schema schema.json
"""


async def _read_lines(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yields the lines of a file, or of a pipe without blocking the event loop. Raises PenstockError for a line that is
    too long."""
    mode = os.fstat(file.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or file.isatty()):
        for line in file:
            yield line
        return
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    try:
        while line := await reader.readline():
            yield line
    except ValueError:
        raise PenstockError(f"--input: a line is longer than {_LONGEST_LINE >> 20} MiB") from None
    finally:
        transport.close()


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = make_parser()
    arguments, more = parser.parse_known_args(argv)
    _check(parser, arguments, more)
    began = time.monotonic()
    with _opened_input(arguments.input) as source, _results(arguments) as results:
        try:
            with _service(parser, arguments, more) as service:
                batch = asyncio.run(_run(arguments, service, source, results))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("\ninterrupted; run the same command again to resume", file=sys.stderr)
            return 130
    _print_summary(batch, time.monotonic() - began)
    return 1 if batch.num_failed else 0


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace, more: list[str]) -> None:
    """Refuses invalid combinations of arguments. ``more`` are flags of ``penstock serve``, which checks them."""
    if more and arguments.target is not None:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    for before, word in pairwise(["", *more]):
        if not word.startswith("--") and (not before.startswith("--") or "=" in before):
            parser.error(f"unrecognized arguments: {word}")
    if (arguments.model is None) == (arguments.target is None):
        parser.error("specify either a MODEL, to run it here, or the --target of a service")
    if arguments.output == "-" and (arguments.overwrite or arguments.retry_failed):
        parser.error("--overwrite and --retry-failed need an --output that is a file")
    if "-" not in (arguments.input, arguments.output):
        paths = Path(arguments.input), Path(arguments.output)
        if all(path.exists() for path in paths) and paths[0].samefile(paths[1]):
            parser.error("--input and --output are the same file")


async def _run(
    arguments: argparse.Namespace, service: ConnectionOptions, source: BinaryIO, results: Results
) -> BatchRun:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    patience = arguments.retry_for if arguments.retry_for is not None else 300.0 if arguments.target else 2.0
    async with (
        AsyncClient(service.target, api_key=service.api_key, tls=service.tls) as client,
        BatchGateway(service) as gateway,
    ):
        with advised():
            await client.model()  # fails early if the service cannot be reached
        bar = tqdm(total=_num_lines(source), unit=" lines", file=sys.stderr, disable=None, dynamic_ncols=True)
        with bar as progress:
            defaults = dict([*arguments.settings, *constraint_settings(arguments)])
            batch = BatchRun(client, gateway, results, defaults, arguments.concurrency, patience, progress)
            await batch.run(_read_lines(source))
    return batch


def _print_summary(batch: BatchRun, seconds: float) -> None:
    skipped = f"{batch.num_skipped:,} were already done, " if batch.num_skipped else ""
    print(
        f"{batch.num_done:,} lines done, {skipped}{batch.num_failed:,} failed in all; "
        f"{batch.output_tokens:,} tokens in {seconds:.1f} s",
        file=sys.stderr,
    )
    if batch.num_failed:
        print("run again with --retry-failed to retry the failed lines", file=sys.stderr)


@contextmanager
def _opened_input(path: str) -> Iterator[BinaryIO]:
    if path == "-" and not sys.stdin.isatty():
        yield sys.stdin.buffer
        return
    if path == "-":
        # A terminal is reopened: the event loop makes it non-blocking, which would also affect standard output.
        path = os.ttyname(sys.stdin.fileno())
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; only a failure to open is reported here
    except OSError as error:
        raise PenstockError(f"--input: cannot read {path}: {error.strerror}") from None
    with file:
        yield file


@contextmanager
def _results(arguments: argparse.Namespace) -> Iterator[Results]:
    if arguments.output == "-":
        yield StreamResults(sys.stdout.buffer)
        return
    path = Path(arguments.output)
    if path.exists() and not path.is_file():
        with path.open("wb") as device:  # /dev/null, or a named pipe
            yield StreamResults(device)
        return
    with closing(FileResults(path, overwrite=arguments.overwrite, retry_failed=arguments.retry_failed)) as results:
        yield results


@contextmanager
def _service(parser: CommandParser, arguments: argparse.Namespace, more: list[str]) -> Iterator[ConnectionOptions]:
    """Yields the given service, or one that runs in this process meanwhile."""
    if arguments.target is not None:
        yield connection(arguments, arguments.target)
        return
    # Imported by name: the bare client has no server.
    local_service = import_module("penstock.service.app.embedded").local_service
    with ExitStack() as stack:
        try:
            target = stack.enter_context(local_service(arguments.model, *more))
        except PenstockError as error:  # a misspelt flag of this command is treated as one of penstock serve
            near = [f"{flag} instead of {name}" for name, flag in parser.misspelt_flags().items() if name in str(error)]
            if near:
                raise PenstockError(f"{error}; or did you mean {' and '.join(near)}?") from None
            raise
        yield ConnectionOptions(target)


def _num_lines(file: BinaryIO) -> int | None:
    """Counts the lines for the progress bar; returns None if that is impossible without consuming them."""
    if not file.seekable():
        return None
    start = file.tell()
    count = sum(1 for _ in file)
    file.seek(start)
    return count


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "generate",
        "Runs a file of requests. Can be interrupted at any time; run the same command again to resume.",
        _EPILOG,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="run this model here: a directory, a Hugging Face id, or demo; accepts the flags of penstock serve too "
        "(needs penstock-llm[cpu], [torch] or [cuda])",
    )
    parser.add_argument("--input", required=True, metavar="IN.jsonl", help="file of requests; - is standard input")
    parser.add_argument("--output", required=True, metavar="OUT.jsonl", help="file of results; - is standard output")
    parser.add_argument("--overwrite", action="store_true", help="start OUT over instead of resuming")
    parser.add_argument("--retry-failed", action="store_true", help="remove failed lines from OUT and retry them")
    add_setting_flag(parser, "an option for lines that do not set it, such as max_tokens=100; may be repeated")
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=256,
        metavar="N",
        help="maximum number of concurrent requests (default: 256)",
    )
    parser.add_argument(
        "--retry-for",
        type=float,
        metavar="SECONDS",
        help="how long to retry while the service is unavailable or busy (default: 300; 2 for a model that runs here)",
    )
    add_constraint_flags(parser)
    add_connection_flags(parser, "use this running service instead")
    return parser
