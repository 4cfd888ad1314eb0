"""The command ``penstock worker``: runs the ranks of this host for a leader on another one."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.clients.cli.command_parser import CommandParser, positive, reporting
from penstock.clients.host.distribution import installed_version
from penstock.clients.host.machine import inspect_machine
from penstock.clients.host.reloaded_files import FileError
from penstock.models.executor.join.agent import AgentSettings, HostAgent
from penstock.models.executor.join.refusal import JoinRefused
from penstock.models.executor.log_format import JSON, TEXT, set_up_logging
from penstock.service.config.addresses import Address, ListenError
from penstock.service.config.command_line import PROGRAM as SERVE
from penstock.service.config.flags import ConfigError
from penstock.service.config.host_flags import check_interface, check_join_tls
from penstock.service.config.serve_config import ServeConfig
from penstock.service.hosts.credentials import JoinCredentials
from penstock.service.hosts.host_model import HostChoices, find_local_model
from penstock.service.hosts.leader import shared_settings

PROGRAM = "penstock worker"
USAGE_ERROR = 2

_log = logging.getLogger(__name__)

_EPILOG = """\
Joins the leader, which is penstock serve --nnodes N on another host, and runs the ranks of this host for it. Waits for
a leader that is not there yet, and joins again when it is lost; its ranks end with the connection. Serves no requests
itself. Exit status: 0 after SIGTERM or Ctrl-C, 1 if the leader refuses this host for a reason that stays (another
version, token or model), 2 for invalid flags.

examples:
  penstock worker --join 10.0.0.1:29501 --join-token-file token
  penstock worker --join leader:29501 --join-token-file token --model /data/my-model
  penstock worker --join leader:29501 --join-tls-ca ca.pem --join-tls-cert host.pem --join-tls-key host.key

a token of 32 random bytes, the same file on every host:
  (umask 077; openssl rand -hex 32 > token)
"""


@dataclass(frozen=True)
class WorkerCommand:
    """What an agent's command line or ``penstock serve --node-rank`` chooses."""

    leader: Address
    node_rank: int
    token_file: Path | None
    tls_files: tuple[Path | None, Path | None, Path | None]
    """CA, certificate and key: all or none."""
    settings: Mapping[str, str]
    choices: HostChoices
    program: str = PROGRAM
    """The command that the operator ran, for errors."""


def main(argv: list[str]) -> NoReturn:
    """Runs until it is stopped, and ends the process with the exit status. Raises PenstockError."""
    given = make_parser().parse_args(argv)
    try:
        check_join_tls(given.join_tls_ca, given.join_tls_cert, given.join_tls_key)
        check_interface(given.collective_interface)
    except ConfigError as error:
        _write(str(error))
        end_process(USAGE_ERROR)
    choices = HostChoices(**{name: getattr(given, name) for name in HostChoices.__dataclass_fields__})
    command = WorkerCommand(
        leader=given.join,
        node_rank=given.node_rank,
        token_file=given.join_token_file,
        tls_files=(given.join_tls_ca, given.join_tls_cert, given.join_tls_key),
        settings={},
        choices=choices,
    )
    set_up_logging(choices.log_format, choices.log_level, holds_texts=False)
    end_process(run_worker(command))


def follow(config: ServeConfig) -> int:
    """Runs the ranks of a host of ``penstock serve --node-rank`` until it is stopped; returns the exit status. Logging
    is set up already."""
    choices = HostChoices(
        model=config.model,
        revision=config.revision,
        gguf_file=config.gguf_file,
        threads=config.threads,
        cpu_pinning=config.cpu_pinning,
        collective_interface=config.collective_interface,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    command = WorkerCommand(
        leader=Address(config.master_addr, config.master_port),
        node_rank=config.node_rank,
        token_file=config.join_token_file,
        tls_files=(config.join_tls_ca, config.join_tls_cert, config.join_tls_key),
        settings=shared_settings(config),
        choices=choices,
        program=SERVE,
    )
    return run_worker(command)


def run_worker(command: WorkerCommand) -> int:
    """Runs until it is stopped or refused; returns the exit status."""
    try:
        credentials = JoinCredentials.read(command.token_file, *command.tls_files, is_leader=False)
        machine = inspect_machine()
        with ExitStack() as resources:
            settings = AgentSettings(
                host=command.leader.host,
                port=command.leader.port,
                version=installed_version(),
                node_rank=command.node_rank,
                token=credentials.token,
                tls=credentials.tls,
                settings=command.settings,
                num_threads=command.choices.threads or machine.topology.num_threads(),
                num_gpus=len(machine.gpus),
                memory_bytes=machine.memory_bytes,
            )
            agent = HostAgent(settings, lambda served: find_local_model(served, command.choices, machine, resources))
            _log.info("penstock %s: runs ranks for the leader at %s", installed_version(), settings)
            # Not ``asyncio.run``, which waits for a thread that may be looking up a name.
            asyncio.new_event_loop().run_until_complete(_run(agent))
    except (FileError, JoinRefused) as error:
        if command.choices.log_format == JSON:
            _log.critical("%s", error)
        else:
            _write(str(error), command.program)
        return 1
    return 0


async def _run(agent: HostAgent) -> None:
    """Runs until SIGTERM or SIGINT."""
    running = asyncio.ensure_future(agent.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def end_process(status: int) -> NoReturn:
    """Ends this process now: a thread may still download a model."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    os._exit(status)


def _write(message: str, program: str = PROGRAM) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe
        sys.stderr.write(f"{program}: {' '.join(message.split())}\n")


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser("worker", "Runs a part of a model that several hosts share.", _EPILOG)
    parser.add_argument(
        "--join", type=reporting(_parse_leader), metavar="HOST:PORT", required=True,
        help="the leader's address and port, which penstock serve --nnodes prints",
    )  # fmt: skip
    parser.add_argument(
        "--node-rank", type=positive, metavar="N", default=-1, help="this host's number (default: any that is free)"
    )
    joining = parser.add_argument_group("how it joins; as in penstock serve")
    for name, text in (
        ("token-file", "the file of the secret that the hosts share (default: none)"),
        ("tls-ca", "CA certificates, in PEM, that must have signed the leader's certificate (default: no TLS)"),
        ("tls-cert", "this host's certificate, in PEM (default: no TLS)"),
        ("tls-key", "its private key, in PEM (default: no TLS)"),
    ):
        joining.add_argument(f"--join-{name}", type=Path, metavar="FILE", help=text)
    model = parser.add_argument_group("the model on this host; it must have the same files as the leader's")
    model.add_argument(
        "--model", metavar="MODEL", help="a directory, a GGUF file or an id on the hub (default: the leader's)"
    )
    model.add_argument("--revision", metavar="NAME", help="of --model on the hub (default: the main branch)")
    model.add_argument("--gguf-file", metavar="NAME", help="of --model (default: none)")
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument(
        "--threads", type=positive, metavar="N",
        help="compute threads of this host's ranks together (default: one for each core that it may use)",
    )  # fmt: skip
    hardware.add_argument(
        "--cpu-pinning", choices=["auto", "on", "off"], default="auto",
        help="whether threads are pinned to cores (default: auto)",
    )  # fmt: skip
    hardware.add_argument(
        "--collective-interface", metavar="NAME",
        help="the network interface over which ranks exchange tensors (default: the one that routes to the leader)",
    )  # fmt: skip
    log = parser.add_argument_group("operation")
    log.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info",
        help="least severe level that is logged (default: info)",
    )  # fmt: skip
    log.add_argument(
        "--log-format", choices=[TEXT, JSON], default=TEXT, help="lines of text, or one JSON object per line"
    )
    return parser


def _parse_leader(text: str) -> Address:
    try:
        address = Address.parse(text, "--join")
    except ListenError:
        address = Address()
    if address.path is not None or not address.host or not address.port:
        raise ValueError(f"must be HOST:PORT with a port of 1 to 65535; it is {text!r}")
    return address
