"""The images' files: hadolint accepts them, and they fit the wheels, the Helm chart and the service's listeners."""

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from penstock.clients.channel import DEFAULT_TARGET
from penstock.service.config.addresses import READY_PATH, Address, metrics_address

ROOT = Path(__file__).parents[2]
FILES = [ROOT / f"deploy/docker/{name}.Dockerfile" for name in ("cpu", "cuda")]
CHART = ROOT / "deploy/helm/penstock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
both = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)

Instruction = tuple[str, str]


def instructions(file: Path) -> list[Instruction]:
    """The instructions of a Dockerfile: the word, and the rest in one line."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def only(file: Path, word: str) -> str:
    """The argument of an instruction that occurs once."""
    (found,) = (rest for each, rest in instructions(file) if each == word)
    return found


def variables(file: Path) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", only(file, "ENV")))


def health_check(file: Path) -> list[str]:
    return [str(word) for word in json.loads(only(file, "HEALTHCHECK").partition(" CMD ")[2])]


# ------------------------------------------------------------------------------------------------------------- hadolint


@both
def test_hadolint_accepts(file: Path, find_program: Callable[[str], str]) -> None:
    command = [find_program("hadolint"), "--no-color", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_reports_what_is_wrong(tmp_path: Path, find_program: Callable[[str], str]) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(FILES[0].read_text().replace('ENTRYPOINT ["penstock"]', "ENTRYPOINT penstock"))
    command = [find_program("hadolint"), "--no-color", str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "DL3025" in done.stdout


# ------------------------------------------------------------------------------------------------------------ agreement


def test_the_file_for_gpus_says_that_it_was_not_built() -> None:
    assert "has not been built" in FILES[1].read_text(encoding="utf-8").splitlines()[0]


@both
def test_the_user_and_the_folders_are_those_of_the_chart(file: Path) -> None:
    context = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    assert only(file, "USER") == f"{context['runAsUser']}:{context['runAsGroup']}"
    pod = (CHART / "templates/_pod.tpl").read_text()
    own = variables(file)
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        assert f"- {{name: {name}, value: {own[name]}}}" in pod
        assert f"mountPath: {own[name]}}}" in pod
    if "cuda" in file.name:
        assert f"- {{name: TRITON_CACHE_DIR, value: {own['TRITON_CACHE_DIR']}}}" in pod


@both
def test_the_ports_are_those_of_the_service_and_the_chart(file: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    ports = [values["ports"]["grpc"], values["ports"]["metrics"], values["http"]["port"]]
    assert [int(port) for port in only(file, "EXPOSE").split()] == ports
    assert Address.parse(DEFAULT_TARGET).port == ports[0]


@both
def test_the_version_is_that_of_the_wheels(file: Path) -> None:
    assert ("ARG", f"VERSION={PROJECT['version']}") in instructions(file)


@both
def test_the_image_runs_the_service_without_a_shell(file: Path) -> None:
    assert json.loads(only(file, "ENTRYPOINT")) + json.loads(only(file, "CMD")) == ["penstock", "serve"]


@both
def test_the_build_gets_every_file_that_it_copies(file: Path) -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = [rest.split()[:-1] for word, rest in instructions(file) if word == "COPY" and "--from" not in rest]
    assert {source for sources in copied for source in sources} == let_in
    assert "*" in rules


# --------------------------------------------------------------------------------------------------------- health check


@contextmanager
def answering(status: HTTPStatus) -> Iterator[tuple[int, list[str]]]:
    """Serves HTTP; yields the port and the paths that were fetched."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port, paths
        finally:
            server.shutdown()
            thread.join()


@both
@pytest.mark.parametrize("status", [HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE])
def test_the_health_check_reads_the_metrics_listener(file: Path, status: HTTPStatus) -> None:
    program, *arguments = health_check(file)
    assert program == "python3"
    metrics = metrics_address(None, Address.parse(DEFAULT_TARGET))
    with answering(status) as (port, paths):
        here = [each.replace(str(metrics), f"127.0.0.1:{port}") for each in arguments]
        assert here != arguments
        # A proxy that exists nowhere: the check must not use it.
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        done = subprocess.run([sys.executable, *here], env=proxies, capture_output=True, timeout=120, check=False)
        assert paths == [READY_PATH]
    assert (done.returncode == 0) == (status == HTTPStatus.OK)
