"""A fresh clone's protos, and beside them the project of a caller in which the commands of docs/stubs.md run."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/stubs.md").read_text(encoding="utf-8")
NODE_MODULES = ROOT / "node_modules"
GO_SOURCES = Path("/usr/share/gocode")
"""Where Debian keeps the sources of Go's packages."""
PROTOC = f'#!/bin/sh\nexec "{sys.executable}" -P -m grpc_tools.protoc "$@"\n'


def blocks(section: str, language: str) -> list[str]:
    """The blocks of code of a language below a heading of the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Project:
    """A caller's folder, with the clone in ``../penstock``."""

    folder: Path
    environment: dict[str, str]

    def run(self, script: str) -> str:
        """Runs a block of the page, and returns what it printed."""
        done = subprocess.run(
            ["bash", "-euc", script], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def generate(self, command: str, template: str) -> list[str]:
        """Generates stubs anew, with ``template`` as the ``buf.gen.yaml``, and returns the names of their files."""
        shutil.rmtree(self.folder / "gen", ignore_errors=True)
        (self.folder / "buf.gen.yaml").write_text(template)
        self.run(command)
        return sorted(str(path.relative_to(self.folder)) for path in (self.folder / "gen").rglob("*.*"))

    def with_whole_protoc(self) -> "Project":
        """Returns the project with the protoc of the machine, which has more generators than that of grpcio-tools."""
        _, _, path = self.environment["PATH"].partition(os.pathsep)
        return Project(self.folder, self.environment | {"PATH": path})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Has buf, the plugins of package.json, and a protoc."""
    if not (NODE_MODULES / ".bin/protoc-gen-es").exists():
        pytest.skip("needs the packages of package.json, which `make contract` installs")
    base = tmp_path_factory.mktemp("stubs")
    parent = base / "src/example.com"  # a place where Go finds packages without modules
    clone_protos(parent / "penstock")
    folder, programs = parent / "chat", base / "bin"
    folder.mkdir()
    programs.mkdir()
    (folder / "node_modules").symlink_to(NODE_MODULES)
    (programs / "protoc").write_text(PROTOC)
    (programs / "protoc").chmod(0o755)
    path = [str(programs), str(NODE_MODULES / ".bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    changes = {
        "PATH": os.pathsep.join(path),
        "GO111MODULE": "off",
        "GOGC": "off",  # the compiler takes a fifth less time
        "GOPATH": f"{base}:{GO_SOURCES}",
    }
    return Project(folder, os.environ | changes)


def clone_protos(destination: Path) -> None:
    """Copies what a clone has of the contract: only files that git tracks, and no registry's files."""
    command = ["git", "ls-files", "-z", "buf.yaml", "protos"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a clone")
    for name in filter(None, listed.stdout.split("\0")):
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, destination / name)
