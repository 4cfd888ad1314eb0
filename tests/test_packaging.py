"""What is installed: every file of every folder, under the name `penstock` and no other, and the CPU library."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from penstock.kernels.cpu import bindings as cpu, build as build_cpu
from penstock.kernels.cpu.build import CannotBuild

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]

# Scripts and sources that made what the wheel contains, and that nobody needs installed.
NOT_INSTALLED = (Path("models/train_demo"), Path("kernels/cpu/csrc"), Path("scheduler/testing"))
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
    """A copy of the tree to build from, so that no build folder is left in it; nothing is compiled yet."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS.values():
        copytree(ROOT / folder, copy / folder, ignore=ignore_patterns("__pycache__", "*.so"), dirs_exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def fake_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of FAKE_COMPILER."""
    path = tmp_path_factory.mktemp("bin") / "fake++"
    path.write_text(FAKE_COMPILER)
    path.chmod(0o755)
    return str(path)


def run_with(compiler: str, tree: Path, *command: str) -> str:
    """What a command prints that succeeds, run by this Python in the tree with a compiler."""
    done = subprocess.run(
        [sys.executable, "-P", *command],
        cwd=tree,
        env={**os.environ, "CXX": compiler},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(compiler: str, tree: Path, what: str) -> tuple[Path, str]:
    """A wheel, an editable install's wheel or an sdist, made as pip makes it, and what was printed."""
    printed = run_with(compiler, tree, "-c", f"from setuptools import build_meta; build_meta.build_{what}('{what}s')")
    (built,) = (tree / f"{what}s").iterdir()
    return built, printed


@pytest.fixture(scope="module")
def wheel(tree: Path, fake_compiler: str) -> Path:
    """A wheel."""
    return build(fake_compiler, tree, "wheel")[0]


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


def test_the_wheel_holds_the_contract_and_the_demo_models(wheel_names: list[str]) -> None:
    assert "penstock/v1/descriptor.binpb" in wheel_names
    assert "penstock/v1/generation.proto" in wheel_names
    weights = {name.split("/")[2] for name in wheel_names if name.endswith("/model.safetensors")}
    assert weights == {"demo", "demo_draft", "demo_eagle3"}


def test_the_wheel_holds_the_compiled_library_and_not_its_sources(wheel: Path, wheel_names: list[str]) -> None:
    assert zipfile.ZipFile(wheel).read(f"penstock/kernels/cpu/{LIBRARY}") == b"compiled\n"
    assert [name for name in wheel_names if name.endswith((".cpp", ".h", ".map"))] == []
    assert [name for name in wheel_names if ".so" in name] == [f"penstock/kernels/cpu/{LIBRARY}"]


def test_a_wheel_is_for_a_platform_and_any_python(wheel: Path) -> None:
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")


def test_an_editable_install_has_the_library_beside_its_sources(tree: Path, fake_compiler: str) -> None:
    built, _ = build(fake_compiler, tree, "editable")
    assert (tree / "kernels/cpu" / LIBRARY).read_text() == "compiled\n"
    assert "-py3-none-linux_" in built.name
    assert [name for name in zipfile.ZipFile(built).namelist() if ".so" in name] == []


def test_the_source_distribution_holds_what_the_library_is_made_of(tree: Path) -> None:
    (tree / "kernels/cpu" / LIBRARY).touch()
    built, _ = build(NO_COMPILER, tree, "sdist")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {file.relative_to(ROOT).as_posix() for file in (ROOT / "kernels/cpu/csrc").rglob("*.*")}
    assert expected | {"setup.py", "pyproject.toml", "kernels/cpu/build.py", "kernels/cpu/bindings.py"} <= names
    assert [name for name in names if ".so" in name] == []


def test_an_install_without_a_compiler_succeeds_with_one_warning(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    copytree(tree, copy, ignore=ignore_patterns("*.so", "build", "wheels", "editables", "sdists"))
    built, printed = build(NO_COMPILER, copy, "wheel")
    names = zipfile.ZipFile(built).namelist()
    assert "penstock/kernels/cpu/bindings.py" in names
    assert [name for name in names if ".so" in name] == []
    (line,) = [line for line in printed.splitlines() if "penstock: WARNING" in line]
    assert "plain torch" in line
    assert "g++" in line


def test_no_file_needs_a_table_of_contents() -> None:
    sources = [file for file in source_files() if file.suffix in {".py", ".proto", ".cpp", ".h"}]
    sources += [file.relative_to(ROOT) for folder in ("tests", "models") for file in (ROOT / folder).rglob("*.py")]
    written = {file for file in sources if "_pb2" not in file.name}
    assert len(written) > 100
    most = {file: 550 if file.suffix == ".proto" else 500 for file in written}  # a contract is mostly comments
    assert [str(file) for file in sorted(most) if len((ROOT / file).read_text().splitlines()) > most[file]] == []


@pytest.mark.soak
def test_an_installed_library_runs_here(cpu_library: Path, tree: Path, tmp_path: Path) -> None:
    """Compiled by whatever compiles here, which takes a while."""
    compiler = shlex.join(build_cpu.find_compiler())
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path)]
    run_with(compiler, tree, "-m", "pip", "install", *flags, ".")
    code = "from penstock.kernels.cpu import bindings as cpu, isa_report; print(cpu.library_path()); isa_report.main()"
    printed = run_with(compiler, tree, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}").splitlines()
    assert printed[0] == str(tmp_path / "penstock/kernels/cpu" / LIBRARY)
    assert printed[1:] == [level for level in cpu.LEVELS if cpu.find_kernels(level)]


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
