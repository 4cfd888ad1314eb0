"""Builds the wheels of a release and checks them. `make wheels` installs the tools and runs it. Examples:

    python deploy/wheels/build.py                                all wheels, in dist/
    python deploy/wheels/build.py --only main,demo               without compiling anything
    python deploy/wheels/build.py --only cpu --machine aarch64   the CPU library for one machine

Zig's C++ compiler compiles the CPU library, because it links against an older glibc than the installed one, and for
other machines. So the wheels run on every distribution since 2018 (manylinux_2_28).
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
DEMO_MODELS = ("demo", "demo_draft", "demo_eagle3")
MAX_MAIN_BYTES = 3 << 20
"""The limit of the main wheel, which clients install."""
builder = runpy.run_path(str(ROOT / "kernels/cpu/build.py"))


def build_main(out: Path) -> Path:
    """Builds ``penstock-llm``: pure Python, without models."""
    shutil.rmtree(ROOT / "build/lib", ignore_errors=True)  # setuptools would include files that are no longer there
    wheel = _build(ROOT, out)
    if wheel.stat().st_size > MAX_MAIN_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {MAX_MAIN_BYTES:,}")
    return wheel


def build_demo(out: Path) -> Path:
    """Builds ``penstock-llm-demo``."""
    with tempfile.TemporaryDirectory() as scratch:
        package = _stage("demo", Path(scratch), '"""The demo model and its drafters."""\n', "demo_models")
        for name in DEMO_MODELS:
            shutil.copytree(ROOT / "models" / name, package / name)
        return _build(Path(scratch), out)


def build_cpu(out: Path, machine: str) -> Path:
    """Builds ``penstock-llm-cpu`` for a machine, and checks what the library needs from the system."""
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}", "-s"]
    with tempfile.TemporaryDirectory() as folder:
        library = builder["build"](Path(folder), compiler=compiler, machine=machine)
        wheel = package_cpu(library, out, platform)
    _audit(wheel, machine)
    return wheel


def package_cpu(library: Path, out: Path, platform: str) -> Path:
    """Makes the wheel of a compiled library."""
    with tempfile.TemporaryDirectory() as scratch:
        package = _stage("cpu", Path(scratch), '"""The compiled CPU library."""\n', "cpu_library")
        shutil.copy(library, package)
        return _build(Path(scratch), out, PENSTOCK_WHEEL_PLATFORM=platform)


def write_sbom(out: Path) -> Path:
    """Writes the software bill of materials: everything that a server on a CPU installs, by version and hash."""
    path = out / "penstock-llm.cdx.json"
    command = ["-m", "cyclonedx_py", "requirements", "--output-reproducible", "--output-file", path]
    subprocess.run([sys.executable, *command, ROOT / "requirements-serve.lock"], check=True)
    return path


def _stage(project: str, folder: Path, docstring: str, package: str) -> Path:
    """Copies a project of this folder, and returns its package, which is empty apart from its docstring."""
    shutil.copytree(HERE / project, folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "LICENSE", folder)
    target = folder / "penstock" / package
    target.mkdir(parents=True)
    (target / "__init__.py").write_text(docstring)
    return target


def _build(project: Path, out: Path, **environment: str) -> Path:
    """Builds a project's wheel with the installed setuptools, as pip does."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--wheel-dir", scratch, str(project)]
        subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=scratch)
        (wheel,) = Path(scratch).iterdir()
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def _audit(wheel: Path, machine: str) -> None:
    """Exits unless auditwheel finds that the wheel runs with ``GLIBC`` or an older glibc."""
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
    )
    found = re.search(rf'platform tag:\s+"manylinux_(\d+)_(\d+)_{machine}"', done.stdout)
    if done.returncode or found is None or [*map(int, found.groups())] > [*map(int, GLIBC.split("."))]:
        sys.exit(f"{wheel.name} needs a newer system than manylinux_{GLIBC}:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Builds what the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="main,demo,cpu,sbom", help="what to build (default: %(default)s)")
    parser.add_argument("--machine", default=",".join(MACHINES), help="the machines of the CPU library (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the wheels (default: dist)")
    arguments = parser.parse_args()
    builds = {
        "main": lambda: [build_main(arguments.out)],
        "demo": lambda: [build_demo(arguments.out)],
        "cpu": lambda: [build_cpu(arguments.out, machine) for machine in arguments.machine.split(",")],
        "sbom": lambda: [write_sbom(arguments.out)],
    }
    chosen = arguments.only.split(",")
    if not builds.keys() >= set(chosen):
        parser.error(f"--only: choose from {', '.join(builds)}")
    for part in chosen:
        for path in builds[part]():
            kind = f"{len(zipfile.ZipFile(path).namelist())} files" if path.suffix == ".whl" else "bill of materials"
            print(f"{path}  {path.stat().st_size:,} bytes, {kind}", flush=True)


if __name__ == "__main__":
    main()
