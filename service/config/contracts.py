"""The contracts of other engines that the service also serves, and the flag that turns them on."""

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from penstock.clients.cli.command_parser import nearest
from penstock.clients.host.distribution import install_command
from penstock.service.config.flags import ConfigError

FLAG = "--contracts"


class ForeignContract(NamedTuple):
    """One contract. Its module is imported only if the contract is on."""

    module: str
    """The module with ``add_to_server``; see ``rpc.contracts``."""
    service: str
    """The full name of its gRPC service."""
    package: str
    """The importable package with its messages."""
    extra: str
    """The extra that installs the package."""


CONTRACTS: Mapping[str, ForeignContract] = {
    "vllm": ForeignContract(
        "penstock.service.rpc.vllm.servicer", "vllm.grpc.engine.VllmEngine", "smg_grpc_proto", "smg"
    ),
}
"""Every contract, by its name in the flag."""


def read_contracts(text: str | None) -> tuple[str, ...]:
    """Returns the distinct names in the flag's value. Raises ConfigError for an unknown name, or for a contract whose
    package is not installed."""
    names = [name.strip() for name in (text or "").split(",")]
    names = [name for name in dict.fromkeys(names) if name]
    for name in names:
        contract = CONTRACTS.get(name)
        if contract is None:
            near = nearest(name, CONTRACTS)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"{FLAG}: there is no contract {name!r}{hint}; there is {', '.join(CONTRACTS)}")
        if importlib.util.find_spec(contract.package) is None:
            raise ConfigError(
                f"{FLAG}: {name} needs a package that is not installed; {install_command(contract.extra)}, or omit it"
            )
    return tuple(names)
