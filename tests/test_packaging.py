"""What is installed: every file of every folder, under the name `penstock` and no other."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]

# Scripts that made what the wheel contains, and that nobody needs installed.
NOT_INSTALLED = (Path("models/train_demo"),)


def source_files() -> list[Path]:
    """Every file of the folders that are packages, relative to the root, but for what Python and macOS leave there."""
    files = [file for folder in FOLDERS.values() for file in (ROOT / folder).rglob("*") if file.is_file()]
    relative = [file.relative_to(ROOT) for file in files if "__pycache__" not in file.parts and file.name[0] != "."]
    return sorted(file for file in relative if not any(file.is_relative_to(folder) for folder in NOT_INSTALLED))


def installed_name(file: Path) -> str:
    """Where a file of the tree stands in the wheel: protos/penstock/v1/x.proto is penstock/v1/x.proto."""
    for package, folder in FOLDERS.items():
        if file.is_relative_to(folder):
            return f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}"
    raise AssertionError(file)


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the files in a wheel built from a copy of the tree, so that no build folder is left in it."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS.values():
        copytree(ROOT / folder, copy / folder, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", "out", "."], cwd=copy, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (copy / "out").glob("*.whl")
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
    assert [folder for folder in FOLDERS.values() if not (ROOT / folder / "py.typed").exists()] == []


def test_the_wheel_holds_only_penstock(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"penstock"}
    assert not [name for name in wheel_names if "train_demo" in name]
    assert "penstock/__init__.py" not in wheel_names


def test_the_wheel_holds_every_file_of_the_folders(wheel_names: list[str]) -> None:
    """So a new kind of file needs a line in package-data, or is seen to be missing here."""
    missing = {installed_name(file) for file in source_files()} - set(wheel_names)
    assert sorted(missing) == []


def test_the_wheel_holds_the_contract_and_the_demo_model(wheel_names: list[str]) -> None:
    assert "penstock/v1/descriptor.binpb" in wheel_names
    assert "penstock/v1/generation.proto" in wheel_names
    assert [name for name in wheel_names if name.startswith("penstock/models/demo/") and name.endswith(".safetensors")]


def test_no_file_needs_a_table_of_contents() -> None:
    sources = [file for file in source_files() if file.suffix in {".py", ".proto", ".cpp", ".h"}]
    sources += [file.relative_to(ROOT) for folder in ("tests", "models") for file in (ROOT / folder).rglob("*.py")]
    written = {file for file in sources if "_pb2" not in file.name}
    assert len(written) > 100
    assert [str(file) for file in sorted(written) if len((ROOT / file).read_text().splitlines()) > 500] == []
