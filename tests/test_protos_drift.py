"""The committed stubs and descriptor set are what `make protos` writes today."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi", "*.binpb")


def generated_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for glob in GENERATED for path in root.rglob(glob)}


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("protos")
    command = ["make", "stubs", f"PROTO_OUT={out}", f"VENV={sys.prefix}"]
    # Where make runs these tests, its own flags and variables are in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return generated_files(out)


def test_the_same_files_are_generated(regenerated: dict[str, bytes]) -> None:
    assert sorted(generated_files(ROOT / "protos")) == sorted(regenerated), "run `make protos`"


def test_the_same_bytes_are_generated(regenerated: dict[str, bytes]) -> None:
    committed = generated_files(ROOT / "protos")
    different = [name for name, content in regenerated.items() if committed.get(name) != content]
    assert different == [], "run `make protos`"


def test_the_descriptor_set_is_self_contained() -> None:
    """Every file that it imports is in it, and so are the messages that a google.rpc.Status may carry."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    files = descriptor_pb2.FileDescriptorSet.FromString(
        (ROOT / "protos/penstock/v1/descriptor.binpb").read_bytes()
    ).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)  # raises where an import is missing
    pool.FindMessageTypeByName("google.rpc.RetryInfo")  # ... or is not there
    pool.FindServiceByName("penstock.v1.GenerationService")
