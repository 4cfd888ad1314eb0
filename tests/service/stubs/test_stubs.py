"""The commands of docs/stubs.md generate stubs from a fresh clone, the stubs compile, and the page's clients work."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
from letters import letters, paced
from waiting import until

from .conftest import GO_SOURCES, ROOT, Project, blocks

CLIENTS = {"Go": Path(__file__).with_name("client.go"), "TypeScript": Path(__file__).with_name("client.ts")}
PROTOS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "protos/penstock/v1").glob("*.proto")}
SERVICES = [name for name, text in PROTOS.items() if "\nservice " in text]
GOOGLE = ["api/annotations", "api/http", "rpc/code", "rpc/error_details", "rpc/status"]
GO_STUBS = [*(f"gen/penstock/v1/{name}.pb.go" for name in PROTOS)]
GO_STUBS += [f"gen/penstock/v1/{name}_grpc.pb.go" for name in SERVICES]
TS_STUBS = [*(f"gen/penstock/v1/{name}_pb.ts" for name in PROTOS), *(f"gen/google/{name}_pb.ts" for name in GOOGLE)]
QUESTION = "#user\nWhat does a kernel do?##assistant\n"
"""The prompt of the clients' chat, with a character for each token."""
OLDEST_PROTOC = 22


def need(project: Project, *programs: str) -> None:
    """Skips a test if one of the programs is missing."""
    missing = [name for name in programs if not shutil.which(name, path=project.environment["PATH"])]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: see deploy/debian-packages.txt")


def test_the_protos_pass_the_linter_and_compile_on_a_fresh_clone(project: Project) -> None:
    project.run("cd ../penstock && buf lint && buf build")


def test_go(project: Project) -> None:
    """The name of the plugins' package in the descriptor set is the protos' own; the files are the same."""
    need(project, "protoc-gen-go", "protoc-gen-go-grpc")
    (template,) = blocks("Go", "yaml")
    commands = blocks("Go", "sh") + blocks("Without the protos", "sh")
    assert len(commands) == 4
    for command in commands:
        assert project.generate(command, template) == sorted(GO_STUBS), command


def test_typescript(project: Project) -> None:
    (template,) = blocks("TypeScript", "yaml")
    commands = blocks("TypeScript", "sh")
    assert len(commands) == 2
    for command in commands:
        assert project.generate(command, template) == sorted(TS_STUBS), command


@pytest.mark.soak
@pytest.mark.parametrize("language", ["Java", "C#"])
def test_a_language_of_protoc_itself(project: Project, language: str) -> None:
    """`make soak` installs a protoc that is new enough."""
    project = project.with_whole_protoc()
    need(project, "protoc", *["grpc_java_plugin"] * (language == "Java"))
    version = project.run("protoc --version").split()[1]
    if int(version.partition(".")[0]) < OLDEST_PROTOC:
        pytest.skip(f"protoc {version} is too old")
    (template,) = blocks(language, "yaml")
    with_buf, with_protoc = (project.generate(command, template) for command in blocks(language, "sh"))
    assert with_buf == with_protoc
    assert any("Generation" in name for name in with_buf)


@pytest.mark.parametrize("language", CLIENTS)
async def test_a_client(project: Project, start_service, language: str) -> None:
    """It streams a chat to its end, cancels a request that has begun, and reads the details of a refusal."""
    if language == "Go":
        need(project, "protoc-gen-go", "protoc-gen-go-grpc", "go")
        if not (GO_SOURCES / "src/google.golang.org/grpc").is_dir():
            pytest.skip("needs the sources of golang-google-grpc-dev")
    shutil.copy(CLIENTS[language], project.folder)
    (project.folder / "package.json").write_text(json.dumps({"type": "module"}))
    project.generate(blocks(language, "sh")[0], *blocks(language, "yaml"))
    service = await start_service(executor=paced())
    script = dict(zip(CLIENTS, blocks("Clients", "sh"), strict=True))[language]
    printed = await asyncio.to_thread(project.run, script.replace("127.0.0.1:50051", service.target))
    answer, cancelled, *refused = printed.splitlines()
    assert answer == f"answer: {letters(len(QUESTION), 40)}"
    assert re.fullmatch(r"request 1: Canceled after [1-9]\d* tokens", cancelled)
    assert refused == blocks("Clients", "text")[0].splitlines()[2:]
    await until(lambda: service.blocks_in_use == 0)


def test_the_page_shows_parts_of_the_clients() -> None:
    for language, client in zip(("go", "ts"), CLIENTS.values(), strict=True):
        (part,) = blocks("Clients", language)
        assert part in client.read_text(encoding="utf-8")
