"""How to call a service, ready to be pasted into a terminal: what ``penstock serve`` prints when it is up."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.service.listen import Address
from penstock.v1 import generation_pb2

_METHOD = f"{generation_pb2.DESCRIPTOR.services_by_name['GenerationService'].full_name}/GenerateOne"
_KEY = "YOUR_KEY"
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
        if self.address.path is not None:
            return str(self.address)
        return Address(_ANYWHERE.get(self.address.host, self.address.host), self.address.port).with_port(
            self.address.port
        )

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
        key = f"PENSTOCK_API_KEY={_KEY} " if self.wants_key else ""
        command = "penstock" if shutil.which("penstock") else str(Path(sys.executable).with_name("penstock"))
        return f"{key}{shlex.quote(command)} chat --target {shlex.quote(self.target)}"

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
