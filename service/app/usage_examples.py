"""Commands that call and administer the service, ready to paste into a terminal. ``penstock serve`` prints them when it
is ready."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from penstock.service.config.addresses import METRICS_PATH, Address
from penstock.v1 import generation_pb2

_METHOD = f"{generation_pb2.DESCRIPTOR.services_by_name['GenerationService'].full_name}/GenerateOne"
_KEY, _ADMIN_KEY = "YOUR_KEY", "YOUR_ADMIN_KEY"
_QUESTION = "What does a kernel do?"
_BEGINNING = "The kernel is"
_MAX_TOKENS = 64
_CA, _CERTIFICATE, _PRIVATE_KEY = "CA.pem", "CLIENT.pem", "CLIENT.key"


class Transport(Enum):
    """The security of a listener, and the files that a client needs for it."""

    PLAIN = auto()
    TLS = auto()
    """Needs the certificate of the authority that signed the service's certificate."""
    MUTUAL_TLS = auto()
    """Needs a client certificate and its key as well."""

    def flags(self, ca: str, certificate: str, key: str) -> str:
        """Returns a program's flags, given their names, each followed by a space."""
        files = [(ca, _CA), (certificate, _CERTIFICATE), (key, _PRIVATE_KEY)]
        num_files = {Transport.PLAIN: 0, Transport.TLS: 1, Transport.MUTUAL_TLS: 3}[self]
        return "".join(f"{name} {file} " for name, file in files[:num_files])

    @property
    def penstock_flags(self) -> str:
        """The flags of penstock's terminal tools."""
        return self.flags("--tls-ca", "--tls-cert", "--tls-key")


@dataclass(frozen=True)
class UsageExamples:
    """One request, sent in four ways, each a shell command."""

    address: Address
    """The service's address, with the bound port."""
    takes_chat: bool
    wants_key: bool
    transport: Transport = Transport.PLAIN

    @property
    def target(self) -> str:
        """The address for a client on this machine."""
        return self.address.reached_at

    @property
    def python(self) -> str:
        """The command that uses this package's client."""
        prompt = [{"role": "user", "content": _QUESTION}] if self.takes_chat else _BEGINNING
        key = f', api_key="{_KEY}"' if self.wants_key else ""
        names, tls = "Client", ""
        if self.transport is not Transport.PLAIN:
            files = self.transport.flags("ca", "certificate", "key").split()
            given = ", ".join(f'{name}="{file}"' for name, file in zip(files[::2], files[1::2], strict=True))
            names, tls = "Client, Tls", f", tls=Tls({given})"
        code = (
            f'from penstock.clients import {names}; client = Client("{self.target}"{key}{tls}); '
            f"print(client.complete({json.dumps(prompt)}, max_tokens={_MAX_TOKENS}).text)"
        )
        return f"{shlex.quote(sys.executable)} -P -c {shlex.quote(code)}"

    @property
    def chat(self) -> str:
        """The command for a chat in the terminal."""
        flags = self.transport.penstock_flags
        return _command(f"chat {flags}--target {shlex.quote(self.target)}", _KEY if self.wants_key else "")

    @property
    def buf(self) -> str:
        """The command for buf, with reflection."""
        where, base = "", f"http://{self.target}"
        if self.transport is not Transport.PLAIN:
            where, base = self.transport.flags("--cacert", "--cert", "--key"), f"https://{self.target}"
        if self.address.path is not None:
            where, base = f"--unix-socket {shlex.quote(str(self.address.path))} ", "http://localhost"
        return f"buf curl --protocol grpc {where}{self._headers}-d {self._data} {shlex.quote(f'{base}/{_METHOD}')}"

    @property
    def grpcurl(self) -> str:
        """The command for grpcurl, with reflection."""
        where = self.target
        if self.address.path is not None:
            where = f"-unix {shlex.quote(str(self.address.path))}"
        security = self.transport.flags("-cacert", "-cert", "-key") or "-plaintext "
        return f"grpcurl {security}{self._headers}-d {self._data} {where} {_METHOD}"

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
            lines += ["Or chat with it:", f"  {self.chat}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class HttpCalls:
    """OpenAI's API over HTTP, with curl: a streamed response, then a whole one."""

    address: Address
    """The gateway's address, with the bound port."""
    model: str
    takes_chat: bool
    wants_key: bool
    has_tls: bool = False

    @property
    def base(self) -> str:
        """The URL for a browser on this machine."""
        return f"http{'s' if self.has_tls else ''}://{self.address.reached_at}"

    def __str__(self) -> str:
        method = "completions"
        prompt: dict[str, object] = {"prompt": _BEGINNING}
        if self.takes_chat:
            method, prompt = "chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}
        body = {"model": self.model, **prompt, "max_tokens": _MAX_TOKENS}
        return (
            f"Use the OpenAI-compatible API at {self.base}/v1, or chat in a browser at {self.base}/ :\n"
            f"  {self._curl(method, {**body, 'stream': True}, '-N ')}\n"
            f"  {self._curl(method, body)}"
        )

    def _curl(self, method: str, body: dict[str, object], options: str = "") -> str:
        key = f"-H {shlex.quote(f'authorization: Bearer {_KEY}')} " if self.wants_key else ""
        url = shlex.quote(f"{self.base}/v1/{method}")
        options += (Transport.TLS if self.has_tls else Transport.PLAIN).flags("--cacert", "--cert", "--key")
        return f"curl {options}{url} {key}-H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


@dataclass(frozen=True)
class Administration:
    """The operators' terminal tools, each a shell command."""

    address: Address
    """The admin listener's address, with the bound port."""
    wants_key: bool
    transport: Transport = Transport.PLAIN

    @property
    def target(self) -> str:
        """The address for an operator on this machine."""
        return self.address.reached_at

    def __str__(self) -> str:
        key = _ADMIN_KEY if self.wants_key else ""
        where = f"{self.transport.penstock_flags}--admin {shlex.quote(self.target)}"
        return (
            f"Watch it, or explain a request, through the admin listener on {self.address}:\n"
            f"  {_command(f'top {where}', key)}\n"
            f"  {_command(f'explain {where} REQUEST_ID', key)}"
        )


def status_page_url(address: Address, *, has_tls: bool) -> str:
    """Returns the line that names the status page."""
    return f"Status page for operators: http{'s' if has_tls else ''}://{address.reached_at}/"


def metrics_call(address: Address) -> str:
    """Returns the command that shows the page for Prometheus."""
    return f"Metrics for Prometheus:\n  curl {shlex.quote(f'http://{address.reached_at}{METRICS_PATH}')}"


def _command(arguments: str, key: str) -> str:
    """Returns a command of this environment's ``penstock``, as short as the search path allows."""
    command = "penstock" if shutil.which("penstock") else str(Path(sys.executable).with_name("penstock"))
    return f"{f'PENSTOCK_API_KEY={key} ' if key else ''}{shlex.quote(command)} {arguments}"
