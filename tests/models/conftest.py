"""Tiny random models in transformers' own format, and an engine over the worker's code, with and without the
process."""

import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engines import Eager, EngineUnderTest, InProcessExecutor

from penstock.kernels.reference import fused as reference_cuda
from penstock.models.backends.cpu.loading import kv_format
from penstock.models.backends.cpu.sizes import block_bytes
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.executor import spawn
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import Executor
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.worker_config import WorkerConfig

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 160
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (variant["config"], variant["changes"])
    for name, variant in json.loads(Path(__file__).with_name("variants.json").read_text()).items()
}
"""Name of a variant: config class, and what differs from SMALL. Windows are shorter than prompts, and caps low enough
to bite."""

OWN_STEPS = (
    "llama",
    "mistral-window9",
    "gemma2",
    "gemma3",
    "gemma4-inputs",
    "gemma4-experts",
    "gpt-oss",
    "deepseek-v3",
    "falcon7b",
    "gpt2",
    "smollm3",
    "ministral3",
    "llama4",
)
"""The variants that differ in how a step reads and writes KV, or in how it uses positions. What the others change is
computed for each token separately."""
FEW_STEPS = ("llama", "gemma3", "gpt-oss", "deepseek-v3")
"""Those of them that differ the most: full attention, windows, sinks with experts, and latents."""


WITHOUT_MODEL = """
from penstock.models.worker import main as worker
from penstock.models.errors import ModelError
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.plan import StepResult

class Runner:
    runs_ahead = needs_tokens = False

    def __init__(self, backend, drafting, grammars):
        pass

    def warm(self):
        pass

    def measure_steps(self):
        return []

    def start_step(self, plan):
        assert not plan.dropped, "row 5 does not exist"
        return lambda: StepResult(plan.step, [], [], 0, 1)

class Backend(FakeExecutor):
    runs_ahead = needs_tokens = False

    def prefault(self):
        pass

def load_backend(config):
    {refuse}
    return Backend()

worker.load_backend = load_backend
worker.Runner = Runner
worker.ALIVE_INTERVAL_S = {interval}
worker.main()
"""
"""A worker in everything but the model, which would take a second to load."""


@pytest.fixture
def fp8_as_on_a_gpu(monkeypatch):
    """Has Triton's interpreter round to fp8 as a GPU does: its own rounding loses the carry to the exponent."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def converted(values, source, target, rounding):
        if (str(source), str(target)) != ("fp32", "fp8e4nv"):
            return convert(values, source, target, rounding)
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture
def narrow_inputs():
    """Has linears of transformers' multiply what fp8 leaves of their inputs: ``narrow_inputs(module, names, group)``,
    by token and by so many columns, 0: all."""

    def with_hooks(module: Any, names: Iterable[str], group: int = 0) -> None:
        def narrow(_: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            [x] = inputs
            codes, scales = reference_cuda.narrow_inputs(x.flatten(0, -2), torch.float8_e4m3fn, group)
            return reference_cuda.dequantize(codes, scales, None, group, None).view(x.shape)

        for name in names:
            module.get_submodule(name).register_forward_pre_hook(narrow)

    return with_hooks


@dataclass(frozen=True)
class TinyModel:
    """A model in a directory, and transformers' own instance of it in fp32."""

    path: Path
    module: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of every position, by transformers."""
        with torch.inference_mode():
            result: torch.Tensor = self.module(torch.tensor([token_ids])).logits[0]
        return result


def tiny_config(config_class: str, changes: dict[str, Any]) -> Any:
    """transformers' config of a tiny model."""
    return getattr(transformers, config_class)(**{**SMALL, **changes})


def build_model(
    path: Path, config_class: str, changes: dict[str, Any], head: str = "CausalLM", **saving: Any
) -> TinyModel:
    """Saves a random model of the class; biases and norms are random too, so that none can be left out unseen."""
    config = tiny_config(config_class, changes)
    torch.manual_seed(7)
    module = getattr(transformers, f"AutoModelFor{head}").from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1 or name.endswith(("bias", "norm.weight")):
                parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        for name, buffer in module.named_buffers():
            if name.endswith(("layer_scalar", "bias")):
                buffer.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    module.eval().save_pretrained(path, **saving)
    return TinyModel(path, module)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products gain nothing from a second thread, and the machine may have other work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """The model of a variant's name; each is made once."""
    made: dict[str, TinyModel] = {}

    def get(variant: str) -> TinyModel:
        if variant not in made:
            made[variant] = build_model(tmp_path_factory.mktemp(variant), *VARIANTS[variant])
        return made[variant]

    return get


@pytest.fixture(scope="session")
def variant_configs() -> dict[str, dict[str, Any]]:
    """The config.json of each variant."""
    configs = {name: tiny_config(*variant) for name, variant in VARIANTS.items()}
    known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return {
        name: {**config.to_dict(), "architectures": [known[type(config)].__name__]} for name, config in configs.items()
    }


@pytest.fixture(scope="session", params=list(VARIANTS))
def any_model(request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    """Every variant in turn."""
    return tiny_model(request.param)


@pytest.fixture(
    scope="session",
    params=[name if name in OWN_STEPS else pytest.param(name, marks=pytest.mark.soak) for name in VARIANTS],
)
def typical_model(request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    """Each of ``OWN_STEPS`` in turn, and in the soak tests every variant."""
    return tiny_model(request.param)


@pytest.fixture(
    scope="session",
    params=[name if name in FEW_STEPS else pytest.param(name, marks=pytest.mark.soak) for name in VARIANTS],
)
def distinct_model(request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    """Each of ``FEW_STEPS`` in turn, and in the soak tests every variant."""
    return tiny_model(request.param)


Start = Callable[..., Any]


@pytest.fixture
async def start_engine() -> AsyncIterator[Start]:
    """Starts engines, and stops them when the test is over: ``await start_engine(executor, **scheduler_config)``."""
    engines: list[Engine] = []

    async def start(executor: Executor, **config: Any) -> EngineUnderTest:
        engine = Engine(executor, SchedulerConfig(**config))
        engines.append(engine)
        await engine.start()
        return EngineUnderTest(engine)

    yield start
    for engine in engines:
        await engine.stop()


@pytest.fixture
def captures_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, fails a test in which a step of the CUDA backend does what a CUDA graph cannot capture."""
    if not torch.cuda.is_available():
        from without_gpu.capture_checks import check_captures

        check_captures(monkeypatch)


@pytest.fixture
def in_process() -> Callable[..., InProcessExecutor]:
    """An executor in this process: ``in_process(model_path, num_blocks=..., dtype=...)``."""

    def make(path: Path, num_blocks: int | None = None, **config: Any) -> InProcessExecutor:
        return InProcessExecutor(worker_config(path, num_blocks, **config))

    return make


@pytest.fixture
def in_process_executor() -> type[InProcessExecutor]:
    """For test modules of folders below, which cannot import it."""
    return InProcessExecutor


@pytest.fixture
def eager() -> type[Eager]:
    """Likewise."""
    return Eager


def worker_config(path: Path, num_blocks: int | None = None, **config: Any) -> WorkerConfig:
    """A small worker in fp32; ``num_blocks`` of KV exactly."""
    values: dict[str, Any] = {
        "backend": "reference",
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 64,
        **config,
    }
    if num_blocks is not None:
        info = check_checkpoint(path)
        spec = info.spec
        if values["backend"] == "cpu":
            kv = kv_format(WorkerConfig(model=str(path), **values), info, values["dtype"])
            values["kv_cache_bytes"] = num_blocks * block_bytes(spec, kv, 16)
        else:
            element = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[values["dtype"]]
            values["kv_cache_bytes"] = (num_blocks + 1) * 16 * spec.kv_bytes_per_token(element)
    else:
        values.setdefault("kv_cache_bytes", 64 << 20)
    return WorkerConfig(model=str(path), **values)


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From a call on, workers that start have no model, and say that they live every ``interval`` seconds; ``refuse``
    is a statement by which one may refuse its ``config``."""

    def without_model(interval: float = 0.5, refuse: str = "pass") -> None:
        code = WITHOUT_MODEL.replace("{interval}", str(interval)).replace("{refuse}", refuse)
        monkeypatch.setattr(spawn, "WORKER", code)

    return without_model


@pytest.fixture(scope="session", name="worker_config")
def worker_config_fixture() -> Callable[..., WorkerConfig]:
    """``worker_config`` for test modules, which cannot import a conftest."""
    return worker_config


@pytest.fixture(scope="session", name="build_model")
def build_model_fixture() -> Callable[..., TinyModel]:
    """``build_model`` for test modules."""
    return build_model


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Changes fields of a config.json; the value ``...`` removes one."""

    def edit(path: Path, **changes: Any) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text())
        for name, value in changes.items():
            if value is ...:
                config.pop(name, None)
            else:
                config[name] = value
        file.write_text(json.dumps(config))

    return edit


@pytest.fixture
def prompts() -> list[list[int]]:
    """Eight prompts of 1 to 75 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 5, 16, 17, 31, 40, 64, 75)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
