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
    """The module with ``add_to_server``; see ``rpc.foreign.contracts``."""
    services: tuple[str, ...]
    """The full names of its gRPC services."""
    package: str = ""
    """The importable package or module with its messages; empty: penstock has them."""
    extra: str = ""
    """The extra that installs the package; empty: none does."""
    remedy: str = ""
    """How to install the package, if no extra does."""
    reports_cache: bool = False
    """Whether it reports the contents of the prefix cache, and so all prompts."""

    @property
    def is_installed(self) -> bool:
        if not self.package:
            return True
        try:
            return importlib.util.find_spec(self.package) is not None
        except ModuleNotFoundError:  # a parent of the module
            return False


CONTRACTS: Mapping[str, ForeignContract] = {
    "kserve": ForeignContract("penstock.service.rpc.kserve.servicer", ("inference.GRPCInferenceService",)),
    "openengine": ForeignContract(
        "penstock.service.rpc.openengine.servicer",
        ("openengine.v1.Control", "openengine.v1.Inference"),
        "openengine.v1.openengine_pb2_grpc",
        remedy="install the bindings of OpenEngine (docs/openengine.md)",
        reports_cache=True,
    ),
    "vllm": ForeignContract(
        "penstock.service.rpc.vllm.servicer",
        ("vllm.grpc.engine.VllmEngine",),
        "smg_grpc_proto",
        "smg",
        reports_cache=True,
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
        if not contract.is_installed:
            remedy = contract.remedy or install_command(contract.extra)
            raise ConfigError(f"{FLAG}: {name} needs a package that is not installed; {remedy}, or omit it")
    return tuple(names)
