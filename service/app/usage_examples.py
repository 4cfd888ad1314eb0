"""Commands that call and administer the service, ready to paste into a terminal. ``penstock serve`` prints them when it
is ready."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from penstock.service.config.addresses import METRICS_PATH, Address
from penstock.v1 import classification_pb2, generation_pb2

_GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_CLASSIFICATION = classification_pb2.DESCRIPTOR.services_by_name["ClassificationService"].full_name
_KEY, _ADMIN_KEY = "YOUR_KEY", "YOUR_ADMIN_KEY"
_QUESTION = "What does a kernel do?"
_BEGINNING = "The kernel is"
_DOCUMENTS = ["It schedules processes.", "It is the seed of a fruit."]
_MAX_TOKENS = 64
_CA, _CERTIFICATE, _PRIVATE_KEY = "CA.pem", "CLIENT.pem", "CLIENT.key"


class Transport(Enum):
    """The security of a listener. The value is the number of files that a client needs for it."""

    PLAIN = 0
    TLS = 1
    """Needs the certificate of the authority that signed the service's certificate."""
    MUTUAL_TLS = 3
    """Needs a client certificate and its key as well."""

    def flags(self, ca: str, certificate: str, key: str) -> str:
        """Returns a program's flags, given their names, each followed by a space."""
        files = [(ca, _CA), (certificate, _CERTIFICATE), (key, _PRIVATE_KEY)]
        return "".join(f"{name} {file} " for name, file in files[: self.value])

    @property
    def penstock_flags(self) -> str:
        """The flags of penstock's terminal tools."""
        return self.flags("--tls-ca", "--tls-cert", "--tls-key")


class Purpose(Enum):
    """The main use of the served model. The value is the gRPC method for it."""

    GENERATION = f"{_GENERATION}/GenerateOne"
    SCORING = f"{_CLASSIFICATION}/Score"
    CLASSIFICATION = f"{_CLASSIFICATION}/Classify"


@dataclass(frozen=True)
class UsageExamples:
    """Writes shell commands for one service, each for an address with the bound port."""

    model: str
    takes_chat: bool
    wants_key: bool
    transport: Transport = Transport.PLAIN
    purpose: Purpose = Purpose.GENERATION

    def grpc(self, address: Address) -> str:
        """Returns the same request in three ways, and a chat in the terminal if the model has a chat template."""
        calls = (self.python(address), self.buf(address), self.grpcurl(address))
        lines = ["Call it from Python, with buf or with grpcurl:", *(f"  {call}" for call in calls)]
        if self.takes_chat and self.purpose is Purpose.GENERATION:
            lines += ["Or chat with it:", f"  {self.chat(address)}"]
        return "\n".join(lines)

    def python(self, address: Address) -> str:
        """Returns the command that uses this package's client."""
        prompt = [{"role": "user", "content": _QUESTION}] if self.takes_chat else _BEGINNING
        call = {
            Purpose.GENERATION: f"complete({json.dumps(prompt)}, max_tokens={_MAX_TOKENS}).text",
            Purpose.SCORING: f"score({json.dumps(_QUESTION)}, {json.dumps(_DOCUMENTS)}).scores",
            Purpose.CLASSIFICATION: f"classify({json.dumps(_QUESTION)})",
        }[self.purpose]
        key = f', api_key="{_KEY}"' if self.wants_key else ""
        names, tls = "Client", ""
        if self.transport is not Transport.PLAIN:
            files = self.transport.flags("ca", "certificate", "key").split()
            given = ", ".join(f'{name}="{file}"' for name, file in zip(files[::2], files[1::2], strict=True))
            names, tls = "Client, Tls", f", tls=Tls({given})"
        code = (
            f'from penstock.clients import {names}; client = Client("{address.reached_at}"{key}{tls}); '
            f"print(client.{call})"
        )
        return f"{shlex.quote(sys.executable)} -P -c {shlex.quote(code)}"

    def chat(self, address: Address) -> str:
        target = shlex.quote(address.reached_at)
        return _command(f"chat {self.transport.penstock_flags}--target {target}", _KEY if self.wants_key else "")

    def buf(self, address: Address) -> str:
        """Returns the command for buf, with reflection."""
        where, base = "", f"http://{address.reached_at}"
        if self.transport is not Transport.PLAIN:
            where, base = self.transport.flags("--cacert", "--cert", "--key"), f"https://{address.reached_at}"
        if address.path is not None:
            where, base = f"--unix-socket {shlex.quote(str(address.path))} ", "http://localhost"
        url = shlex.quote(f"{base}/{self.purpose.value}")
        return f"buf curl --protocol grpc {where}{self._header}-d {self._data} {url}"

    def grpcurl(self, address: Address) -> str:
        """Returns the command for grpcurl, with reflection."""
        where = address.reached_at
        if address.path is not None:
            where = f"-unix {shlex.quote(str(address.path))}"
        security = self.transport.flags("-cacert", "-cert", "-key") or "-plaintext "
        return f"grpcurl {security}{self._header}-d {self._data} {where} {self.purpose.value}"

    @property
    def _data(self) -> str:
        prompt: dict[str, object] = {"text": _BEGINNING}
        if self.takes_chat:
            prompt = {"chat": {"messages": [{"role": "user", "content": _QUESTION}]}}
        messages: dict[Purpose, object] = {
            Purpose.GENERATION: {"start": {**prompt, "sampling": {"max_tokens": _MAX_TOKENS}}},
            Purpose.SCORING: {"queries": [_QUESTION], "documents": _DOCUMENTS},
            Purpose.CLASSIFICATION: {"inputs": [{"text": _QUESTION}]},
        }
        return shlex.quote(json.dumps(messages[self.purpose]))

    @property
    def _header(self) -> str:
        return f"-H {shlex.quote(f'authorization: Bearer {_KEY}')} " if self.wants_key else ""

    def http(self, address: Address) -> str:
        """Returns calls of OpenAI's API with curl: one with a streamed response, and one with a whole response; or the
        call for a classification head."""
        base = self._url(address)
        if self.purpose is not Purpose.GENERATION:
            path = "classify"
            fields: dict[str, object] = {"input": _QUESTION}
            if self.purpose is Purpose.SCORING:
                path, fields = "rerank", {"query": _QUESTION, "documents": _DOCUMENTS}
            call = self._curl(f"{base}/v1/{path}", {"model": self.model, **fields})
            return f"Use the OpenAI-compatible API at {base}/v1 :\n  {call}"
        method = "completions"
        prompt: dict[str, object] = {"prompt": _BEGINNING}
        if self.takes_chat:
            method, prompt = "chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}
        body = {"model": self.model, **prompt, "max_tokens": _MAX_TOKENS}
        return (
            f"Use the OpenAI-compatible API at {base}/v1, or chat in a browser at {base}/ :\n"
            f"  {self._curl(f'{base}/v1/{method}', {**body, 'stream': True}, '-N ')}\n"
            f"  {self._curl(f'{base}/v1/{method}', body)}"
        )

    def _curl(self, url: str, body: dict[str, object], options: str = "") -> str:
        if self.transport is not Transport.PLAIN:  # HTTP requires no client certificate
            options += Transport.TLS.flags("--cacert", "--cert", "--key")
        data = shlex.quote(json.dumps(body))
        return f"curl {options}{shlex.quote(url)} {self._header}-H 'content-type: application/json' -d {data}"

    def _url(self, address: Address) -> str:
        return f"http{'' if self.transport is Transport.PLAIN else 's'}://{address.reached_at}"

    def admin(self, address: Address) -> str:
        """Returns the commands of operators' terminal tools."""
        key = _ADMIN_KEY if self.wants_key else ""
        flags = "" if address.is_local else self.transport.penstock_flags
        where = f"{flags}--admin {shlex.quote(address.reached_at)}"
        return (
            f"Watch it, or explain a request, through the admin listener on {address}:\n"
            f"  {_command(f'top {where}', key)}\n"
            f"  {_command(f'explain {where} REQUEST_ID', key)}"
        )

    def status_page(self, address: Address) -> str:
        return f"Status page for operators: {self._url(address)}/"

    def metrics(self, address: Address) -> str:
        """Returns the command that shows the page for Prometheus."""
        return f"Metrics for Prometheus:\n  curl {shlex.quote(f'http://{address.reached_at}{METRICS_PATH}')}"


def _command(arguments: str, key: str) -> str:
    """Returns a command of this environment's ``penstock``, as short as the search path allows."""
    command = "penstock" if shutil.which("penstock") else str(Path(sys.executable).with_name("penstock"))
    return f"{f'PENSTOCK_API_KEY={key} ' if key else ''}{shlex.quote(command)} {arguments}"
