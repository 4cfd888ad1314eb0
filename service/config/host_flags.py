"""The flags of a model that several hosts share: their number, how they join the leader, and how it knows them."""

# ruff: noqa: RUF009 - flag returns a dataclasses.field

import ipaddress
import socket
from dataclasses import dataclass, fields
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.service.config.flags import ConfigError, flag

if TYPE_CHECKING:
    from penstock.service.config.serve_config import ServeConfig

DEFAULT_PORT = 29501
_ONLY_LEADER = ("join_timeout", "join_allow")


@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """The group "several hosts" of the flags of ``penstock serve``."""

    nnodes: int = flag(
        1, "hosts that share the model, with equal numbers of its ranks", metavar="N", low=1, high=64,
        group="several hosts; the leader has node rank 0, the others run penstock worker or have another --node-rank",
    )  # fmt: skip
    node_rank: int = flag(
        0, "this host's number; any but 0 joins the leader at --master-addr and serves nothing itself", metavar="N",
        low=0, high=63,
    )  # fmt: skip
    master_addr: str = flag(
        "127.0.0.1", "the leader's address: there it listens for the other hosts, and there they join it",
        metavar="HOST",
    )  # fmt: skip
    master_port: int = flag(
        DEFAULT_PORT, "the leader's port for the other hosts; 0 is any free port", metavar="PORT", low=0, high=65535
    )
    join_timeout: float = flag(
        600.0, "how long the leader waits for missing hosts, at the start and after a loss", metavar="SECONDS",
        low=1, high=86_400,
    )  # fmt: skip
    join_token_file: Path | None = flag(
        None, "the file of a secret that the hosts must share, of at least 32 bytes; it never crosses the network",
        metavar="FILE", shown="no token; then TLS is required beyond this machine",
    )  # fmt: skip
    join_tls_ca: Path | None = flag(
        None, "CA certificates, in PEM, that must have signed the other side's certificate", metavar="FILE",
        shown="no TLS",
    )  # fmt: skip
    join_tls_cert: Path | None = flag(
        None, "this host's certificate for joining, in PEM", metavar="FILE", shown="no TLS"
    )
    join_tls_key: Path | None = flag(None, "its private key, in PEM", metavar="FILE", shown="no TLS")
    join_allow: str | None = flag(
        None, "networks from which hosts may join the leader, separated by commas, such as 10.0.0.0/8",
        metavar="CIDRS", shown="all",
    )  # fmt: skip
    distributed_executor_backend: str = flag(
        "mp", "who starts the other hosts' workers: mp, you do, or ray, a Ray cluster of which this host is a node",
        choices=["mp", "ray"],
    )  # fmt: skip
    ray_address: str = flag(
        "auto", "the address of the Ray cluster; auto is the one that this host belongs to", metavar="ADDRESS"
    )
    collective_interface: str | None = flag(
        None, "the network interface over which this host's ranks exchange tensors", metavar="NAME",
        shown="the one that routes to the leader",
    )  # fmt: skip


def check_hosts(config: "ServeConfig") -> None:
    """Raises ConfigError for flags of several hosts that exclude or need each other."""
    if config.nnodes == 1:
        _refuse_join_flags(config)
        return
    if config.node_rank >= config.nnodes:
        raise ConfigError(f"--node-rank: must be below --nnodes, which is {config.nnodes}; it is {config.node_rank}")
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if ranks % config.nnodes:
        raise ConfigError(
            f"--nnodes {config.nnodes}: must divide the number of ranks, which is {ranks}: --tensor-parallel-size "
            f"{config.tensor_parallel_size} times --pipeline-parallel-size {config.pipeline_parallel_size}"
        )
    check_join_tls(config.join_tls_ca, config.join_tls_cert, config.join_tls_key)
    read_networks(config.join_allow)
    check_interface(config.collective_interface)
    if config.distributed_executor_backend == "ray" and config.node_rank > 0:
        raise ConfigError("--node-rank: with --distributed-executor-backend ray only the leader is started by hand")
    if not config.master_addr:
        raise ConfigError("--master-addr: is empty; give the leader's address")
    if config.node_rank == 0:
        return
    for name in _ONLY_LEADER:
        if getattr(config, name) != _default(name):
            raise ConfigError(f"{_flag(name)}: is the leader's; leave it out with --node-rank {config.node_rank}")
    if config.master_port == 0:
        raise ConfigError("--master-port: 0 is any free port, for the leader only; give the port that it prints")


def _refuse_join_flags(config: "ServeConfig") -> None:
    for field in fields(HostFlags):
        if field.name != "nnodes" and getattr(config, field.name) != field.default:
            raise ConfigError(
                f"{_flag(field.name)}: is for several hosts; give --nnodes 2 or more, or leave {_flag(field.name)} out"
            )


def _default(name: str) -> object:
    return next(field.default for field in fields(HostFlags) if field.name == name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_join_tls(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Raises ConfigError if only some of the files for TLS between the hosts are given."""
    given = {"--join-tls-ca": ca, "--join-tls-cert": cert, "--join-tls-key": key}
    missing = [name for name, path in given.items() if path is None]
    if 0 < len(missing) < len(given):
        first = next(name for name, path in given.items() if path is not None)
        raise ConfigError(f"{first}: needs {' and '.join(missing)} as well: set all three or none")


def check_interface(name: str | None) -> None:
    """Raises ConfigError if this machine lacks a network interface."""
    known = [found for _, found in socket.if_nameindex()]
    if name is not None and name not in known:
        raise ConfigError(
            f"--collective-interface: this machine has no network interface {name!r}; it has {', '.join(known)}"
        )


def read_networks(text: str | None) -> tuple[IPv4Network | IPv6Network, ...]:
    """Returns the networks of --join-allow. Raises ConfigError."""
    networks: list[IPv4Network | IPv6Network] = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        try:
            networks.append(ipaddress.ip_network(part.strip()))
        except ValueError as error:
            raise ConfigError(
                f"--join-allow: {part.strip()!r} is not a network ({error}); write it as 10.0.0.0/8 or 10.0.0.7"
            ) from None
    if text is not None and not networks:
        raise ConfigError("--join-allow: names no network; give some, such as 10.0.0.0/8, or leave it out")
    return tuple(networks)
