"""How to call and to administer a service, ready to be pasted into a terminal: what ``penstock serve`` prints when it
is up."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.service.listen import Address
from penstock.v1 import generation_pb2

_METHOD = f"{generation_pb2.DESCRIPTOR.services_by_name['GenerationService'].full_name}/GenerateOne"
_KEY, _ADMIN_KEY = "YOUR_KEY", "YOUR_ADMIN_KEY"
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not listened on
_QUESTION = "What does a kernel do?"
_BEGINNING = "The kernel is"
_MAX_TOKENS = 64


@dataclass(frozen=True)
class Calls:
    """One request, in four ways, each a line for a shell."""

    address: Address
    """What the service listens on, with the port that was bound."""
    takes_chat: bool
    wants_key: bool

    @property
    def target(self) -> str:
        """What a client on this machine connects to."""
        return _target(self.address)

    @property
    def python(self) -> str:
        """With the client of this package."""
        prompt = [{"role": "user", "content": _QUESTION}] if self.takes_chat else _BEGINNING
        key = f', api_key="{_KEY}"' if self.wants_key else ""
        code = (
            f'from penstock.clients import Client; client = Client("{self.target}"{key}); '
            f"print(client.complete({json.dumps(prompt)}, max_tokens={_MAX_TOKENS}).text)"
        )
        return f"{shlex.quote(sys.executable)} -P -c {shlex.quote(code)}"

    @property
    def chat(self) -> str:
        """In a terminal, turn by turn."""
        return _command(f"chat --target {shlex.quote(self.target)}", _KEY if self.wants_key else "")

    @property
    def buf(self) -> str:
        """With buf, by reflection."""
        where, base = "", f"http://{self.target}"
        if self.address.path is not None:
            where, base = f"--unix-socket {shlex.quote(str(self.address.path))} ", "http://localhost"
        return f"buf curl --protocol grpc {where}{self._headers}-d {self._data} {shlex.quote(f'{base}/{_METHOD}')}"

    @property
    def grpcurl(self) -> str:
        """With grpcurl, by reflection."""
        where = self.target
        if self.address.path is not None:
            where = f"-unix {shlex.quote(str(self.address.path))}"
        return f"grpcurl -plaintext {self._headers}-d {self._data} {where} {_METHOD}"

    @property
    def _data(self) -> str:
        prompt: dict[str, object] = {"text": _BEGINNING}
        if self.takes_chat:
            prompt = {"chat": {"messages": [{"role": "user", "content": _QUESTION}]}}
        return shlex.quote(json.dumps({"start": {**prompt, "sampling": {"max_tokens": _MAX_TOKENS}}}))

    @property
    def _headers(self) -> str:
        return f"-H {shlex.quote(f'authorization: Bearer {_KEY}')} " if self.wants_key else ""

    def __str__(self) -> str:
        lines = [
            "Call it from Python, with buf or with grpcurl:",
            *(f"  {line}" for line in (self.python, self.buf, self.grpcurl)),
        ]
        if self.takes_chat:
            lines += ["or talk to it:", f"  {self.chat}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Administration:
    """The terminal tools of operators, each a line for a shell."""

    address: Address
    """Where the administration listens, with the port that was bound."""
    wants_key: bool

    @property
    def target(self) -> str:
        """What an operator on this machine connects to."""
        return _target(self.address)

    def __str__(self) -> str:
        key = _ADMIN_KEY if self.wants_key else ""
        where = f"--admin {shlex.quote(self.target)}"
        return (
            f"Watch it, or ask what became of a request, by the administration's listener on {self.address}:\n"
            f"  {_command(f'top {where}', key)}\n"
            f"  {_command(f'explain {where} REQUEST_ID', key)}"
        )


def _target(address: Address) -> str:
    """What a client on this machine connects to."""
    if address.path is not None:
        return str(address)
    return Address(_ANYWHERE.get(address.host, address.host), address.port).with_port(address.port)


def _command(arguments: str, key: str) -> str:
    """A line with this environment's ``penstock``, as short as the search path allows."""
    command = "penstock" if shutil.which("penstock") else str(Path(sys.executable).with_name("penstock"))
    return f"{f'PENSTOCK_API_KEY={key} ' if key else ''}{shlex.quote(command)} {arguments}"
