"""The wheels: every file of every folder, under the name `penstock` and no other; the demo models; the CPU library."""

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

from penstock.kernels.cpu import bindings as cpu, build as build_cpu
from penstock.kernels.cpu.build import CannotBuild

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]

# Models, which have a wheel of their own; scripts and sources that an installation does not need.
DEMO_MODELS = (Path("models/demo"), Path("models/demo_draft"), Path("models/demo_eagle3"))
DEMO_FILES = [file for folder in DEMO_MODELS for file in (ROOT / folder).iterdir()]
NOT_INSTALLED = (Path("models/train_demo"), Path("kernels/cpu/csrc"), Path("scheduler/testing"), *DEMO_MODELS)
LIBRARY = "libpenstock_cpu.so"

# A compiler that writes something wherever it should write, and is done at once; and none at all.
FAKE_COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo compiled > "$2"; fi
  shift
done
"""
NO_COMPILER = "/none"


def source_files() -> list[Path]:
    """Every file of the folders that are packages, relative to the root, but for what Python, macOS and a C++ compiler
    leave there."""
    files = {file for folder in FOLDERS.values() for file in (ROOT / folder).rglob("*") if file.is_file()}
    relative = [file.relative_to(ROOT) for file in files if "__pycache__" not in file.parts and file.name[0] != "."]
    sources = [file for file in relative if file.suffix != ".so" and ".so." not in file.name]
    return sorted(file for file in sources if not any(file.is_relative_to(folder) for folder in NOT_INSTALLED))


def installed_name(file: Path) -> str:
    """Where a file of the tree stands in the wheel: protos/penstock/v1/x.proto is penstock/v1/x.proto."""
    for package, folder in FOLDERS.items():
        if file.is_relative_to(folder):
            return f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}"
    raise AssertionError(file)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree to build from, so that no build folder is left in it."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in (*FOLDERS.values(), "deploy/wheels"):
        copytree(ROOT / folder, copy / folder, ignore=ignore_patterns("__pycache__", "*.so"), dirs_exist_ok=True)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def fake_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of FAKE_COMPILER."""
    path = tmp_path_factory.mktemp("bin") / "fake++"
    path.write_text(FAKE_COMPILER)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def builder(tree: Path) -> dict[str, Any]:
    """The functions of the script that builds the wheels."""
    return runpy.run_path(str(tree / "deploy/wheels/build.py"))


@pytest.fixture(scope="module")
def wheel(tree: Path, builder: dict[str, Any]) -> Path:
    """The main wheel."""
    built = builder["build_main"](tree / "dist")
    assert isinstance(built, Path)
    return built


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    """The names of the files in the wheel."""
    return zipfile.ZipFile(wheel).namelist()


def test_packages_are_the_folders_and_their_sub_packages() -> None:
    folders = {file.parent for file in source_files() if file.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(
        installed_name(folder).strip("/.").replace("/", ".") for folder in folders
    )


def test_every_folder_at_the_root_that_holds_python_is_listed() -> None:
    with_python = {init.parent.name for init in ROOT.glob("*/__init__.py")}
    assert with_python <= {folder.split("/")[0] for folder in FOLDERS.values()}


def test_every_python_file_is_in_a_package() -> None:
    """A folder without __init__.py would be left out of the wheel."""
    assert [
        str(file)
        for file in source_files()
        if file.suffix == ".py" and not (ROOT / file.parent / "__init__.py").exists()
    ] == []


def test_penstock_stays_a_namespace() -> None:
    assert not (ROOT / "protos/penstock/__init__.py").exists()


def test_every_package_is_typed() -> None:
    rooms = [folder for package, folder in FOLDERS.items() if package.count(".") == 1]
    assert [folder for folder in rooms if not (ROOT / folder / "py.typed").exists()] == []


def test_the_wheel_holds_only_penstock(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"penstock"}
    assert not [name for name in wheel_names if "train_demo" in name]
    assert "penstock/__init__.py" not in wheel_names


def test_the_wheel_holds_every_file_of_the_folders(wheel_names: list[str]) -> None:
    """So a new kind of file needs a line in package-data, or is seen to be missing here."""
    missing = {installed_name(file) for file in source_files()} - set(wheel_names)
    assert sorted(missing) == []


def test_the_main_wheel_is_pure_python_and_has_the_contract_but_no_models(wheel: Path, wheel_names: list[str]) -> None:
    assert wheel.name.startswith("penstock_llm-")
    assert wheel.stem.endswith("-py3-none-any")
    assert "penstock/v1/descriptor.binpb" in wheel_names
    assert "penstock/v1/generation.proto" in wheel_names
    assert [name for name in wheel_names if name.endswith((".safetensors", ".so", ".cpp", ".h", ".map"))] == []


def test_the_demo_wheel_has_every_file_of_the_demo_models(tree: Path, builder: dict[str, Any]) -> None:
    built = builder["build_demo"](tree / "dist")
    assert built.stem.endswith("-py3-none-any")
    names = {name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name}
    models = {file.relative_to(ROOT / "models").as_posix() for file in DEMO_FILES}
    assert len(models) > 10
    assert names == {"penstock/demo_models/__init__.py", *(f"penstock/demo_models/{name}" for name in models)}


def test_the_wheel_of_the_cpu_library_is_for_a_platform_and_any_python(
    tree: Path, builder: dict[str, Any], tmp_path: Path
) -> None:
    library = tmp_path / LIBRARY
    library.write_text("compiled")
    built = builder["package_cpu"](library, tree / "dist", "manylinux_2_28_aarch64")
    assert built.stem.endswith("-py3-none-manylinux_2_28_aarch64")
    with zipfile.ZipFile(built) as archive:
        assert archive.read(f"penstock/cpu_library/{LIBRARY}") == b"compiled"
        assert len([name for name in archive.namelist() if ".dist-info/" not in name]) == 2


def test_the_wheels_of_a_release_have_one_version() -> None:
    files = [ROOT / "pyproject.toml", *ROOT.glob("deploy/wheels/*/pyproject.toml")]
    projects = {(read := tomllib.loads(file.read_text())["project"])["name"]: read for file in files}
    assert projects.keys() == {"penstock-llm", "penstock-llm-cpu", "penstock-llm-demo"}
    (version,) = {project["version"] for project in projects.values()}
    extras = projects["penstock-llm"]["optional-dependencies"]
    pins = {line for lines in extras.values() for line in lines if line.startswith("penstock-llm-")}
    assert pins == {f"penstock-llm-cpu=={version}", f"penstock-llm-demo=={version}"}


@pytest.mark.soak
def test_the_wheels_are_installed_and_serve_without_a_compiler(tmp_path: Path) -> None:
    """Takes minutes: builds all wheels, with the library compiled for two machines."""
    subprocess.run(["make", "wheels"], cwd=ROOT, check=True)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install: list[str | Path] = [
        venv / "bin/pip",
        "install",
        "-q",
        "--find-links",
        ROOT / "dist",
        "penstock-llm[cpu,gateway]",
    ]
    subprocess.run(install, check=True, env={**os.environ, "CXX": NO_COMPILER})
    code = "import sys; from penstock.kernels.cpu import bindings; print(bindings.library_path())"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", cpu.VARIABLE)}
    path = subprocess.check_output([venv / "bin/python", "-P", "-c", code], text=True, env=environment).strip()
    assert Path(path).is_relative_to(venv)
    doctor = subprocess.check_output([venv / "bin/penstock", "doctor"], text=True, env=environment)
    assert "will use the cpu backend" in doctor
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "The kernel", "max_tokens": 8}\n')
    command: list[str | Path] = [
        venv / "bin/penstock",
        "generate",
        "demo",
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        "-",
    ]
    answered = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(answered.stdout)["text"]


def test_no_file_needs_a_table_of_contents() -> None:
    sources = [file for file in source_files() if file.suffix in {".py", ".proto", ".cpp", ".h"}]
    sources += [file.relative_to(ROOT) for folder in ("tests", "models") for file in (ROOT / folder).rglob("*.py")]
    written = {file for file in sources if "_pb2" not in file.name}
    assert len(written) > 100
    most = {file: 550 if file.suffix == ".proto" else 500 for file in written}  # a contract is mostly comments
    assert [str(file) for file in sorted(most) if len((ROOT / file).read_text().splitlines()) > most[file]] == []


# The library's own build ---------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_compiler: str) -> Path:
    """A folder with one source, which the fake compiler compiles."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").touch()
    monkeypatch.setattr(build_cpu, "SOURCES", folder)
    monkeypatch.setenv("CXX", fake_compiler)
    return folder


def test_the_library_is_built_anew_only_if_a_source_is_newer(sources: Path, tmp_path: Path) -> None:
    library = build_cpu.build_if_possible(tmp_path / "made")
    assert library is not None
    library.write_text("as it was")
    build_cpu.build_if_possible(tmp_path / "made")
    assert library.read_text() == "as it was"
    header = sources / "one.h"
    header.touch()
    os.utime(header, ns=(0, library.stat().st_mtime_ns + 1))
    build_cpu.build_if_possible(tmp_path / "made")
    assert library.read_text() == "compiled\n"


def test_the_digest_is_that_of_every_source(sources: Path) -> None:
    digests = [build_cpu.digest()]
    (sources / "one.h").touch()
    digests.append(build_cpu.digest())
    (sources / "one.h").write_text("int")
    digests.append(build_cpu.digest())
    (sources / "one.h").rename(sources / "two.h")
    digests.append(build_cpu.digest())
    assert len(set(digests)) == 4
    (sources / "two.h").unlink()
    assert build_cpu.digest() == digests[0]


@pytest.mark.parametrize("compiler", [NO_COMPILER, "false", "/"])
def test_without_a_compiler_that_works_no_old_library_stays(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], compiler: str
) -> None:
    library = build_cpu.build_if_possible(tmp_path)
    assert library is not None
    os.utime(library, ns=(0, 0))
    monkeypatch.setenv("CXX", compiler)
    assert build_cpu.build_if_possible(tmp_path) is None
    assert not library.exists()
    printed = capfd.readouterr().err
    assert printed.count("WARNING") == 1
    assert printed.splitlines()[-1].startswith("penstock: WARNING")
    with pytest.raises(CannotBuild):
        build_cpu.build(tmp_path)


def test_without_the_sources_nothing_is_built(sources: Path, tmp_path: Path) -> None:
    (sources / "one.cpp").unlink()
    with pytest.raises(CannotBuild, match="in a checkout"):
        build_cpu.build(tmp_path)


def test_what_make_setup_installs_is_locked_by_hash():
    """All but torch, whose CPU builds have other hashes, and what its CUDA builds need. `make lock` writes it anew."""

    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return dict(line.partition(" ")[0].split("==") for line in lines if line[:1].isalnum())

    locked, pinned = pins("requirements.lock"), pins("constraints.txt")
    assert pinned.pop("torch")
    assert locked.items() >= {re.sub("[-_.]+", "-", name).lower(): version for name, version in pinned.items()}.items()
    blocks = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / "requirements.lock").read_text())
    assert all("--hash=sha256:" in block for block in blocks)
