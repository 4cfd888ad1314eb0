"""The grid: every variant of every architecture on every backend, in several types and block sizes, with requests
alone, batched, chunked, cached and preempted. ``make soak`` runs it and prints a table.

In float32 and float64 the tokens are those of transformers. In other types, in which only the CPU backend promises the
same result in every batch, they are those of each request alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from penstock.models.architecture.lines import LINES
from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
WAYS = ("alone", "batched", "chunked", "cached", "preempted")


@dataclass(frozen=True)
class Setup:
    """How a model is loaded, and requests that its backend computes in a short time."""

    backend: str
    dtype: str = "float32"
    block_size: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (17, 1, 40, 31, 64, 75)
    """Of the prompts."""
    num_tokens: int = 16
    max_model_len: int = 200
    chunk: int = 32
    few_blocks: int = 14
    """Blocks of 16 tokens, too few for all requests at once."""

    @property
    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(11)
        return [torch.randint(0, 160, (length,), generator=generator).tolist() for length in self.lengths]


SETUPS = {
    "reference-float32": Setup("reference"),
    "reference-float32-blocks-of-8": Setup("reference", block_size=8),
    "reference-float64-blocks-of-32": Setup("reference", "float64", block_size=32),
    "cpu-float32": Setup("cpu"),
    "cpu-float32-blocks-of-32": Setup("cpu", block_size=32),
    "cpu-bfloat16": Setup("cpu", "bfloat16"),
    "cpu-int8": Setup("cpu", "bfloat16", config={"quantization": "int8", "kv_cache_dtype": "int8"}),
    "cpu-int4": Setup("cpu", "bfloat16", config={"quantization": "int4"}),
    "transformers-float32": Setup("transformers"),
}
ON_CUDA = Setup(
    "cuda",
    config={"device": "cuda" if torch.cuda.is_available() else "cpu", "max_num_seqs": 4},
    lengths=(20, 14, 17),
    num_tokens=4,
    max_model_len=48,
    chunk=16,
    few_blocks=4,
)
"""Without a GPU in Triton's interpreter, which is a thousand times slower."""

NOT_BY_TRANSFORMERS = ("FalconForCausalLM",)
"""Architectures that the backend ``transformers`` refuses, since their attention cannot be replaced."""

Outputs = list[tuple[list[int], list[int]]]
"""Prompts and their outputs."""


class Grid:
    """Runs a setup's requests on a model."""

    def __init__(self, model: Any, setup: Setup, in_process: Callable[..., Any], start_engine: Callable[..., Any]):
        self._model = model
        self._setup = setup
        self._in_process = in_process
        self._start_engine = start_engine

    async def run(self, ways: tuple[str, ...], num_threads: int = 2) -> Outputs:
        """Runs the requests in the given ways, all in one engine, and asserts that they were computed so."""
        setup, prompts = self._setup, self._setup.prompts
        executor = self._in_process(
            self._model.path,
            setup.few_blocks if "preempted" in ways else None,
            backend=setup.backend,
            dtype=setup.dtype,
            block_size=setup.block_size,
            max_model_len=setup.max_model_len,
            num_threads=num_threads,
            **setup.config,
        )
        limits = {"max_num_batched_tokens": setup.chunk} if "chunked" in ways else {}
        engine = await self._start_engine(executor, enable_prefix_caching="cached" in ways, **limits)
        rounds = [[prompt] for prompt in prompts] if "alone" in ways else []
        rounds += [prompts] * (2 if "cached" in ways else 1) if ways != ("alone",) else []
        outputs: Outputs = []
        cached = 0
        for together in rounds:
            answers = await engine.run(together, GREEDY, setup.num_tokens)
            outputs += [(prompt, answer.token_ids) for prompt, answer in zip(together, answers, strict=True)]
            cached += sum(answer.finished.usage.cached_tokens for answer in answers)
        plans = executor.plans
        assert (cached > 0) == ("cached" in ways)
        assert (engine.stats.preemptions > 0) == ("preempted" in ways)
        assert any(chunk.start > 0 for plan in plans for chunk in plan.chunks) or "chunked" not in ways
        assert max(len(plan.decodes) for plan in plans) == len(prompts) or "batched" not in ways
        assert all(len(output) == setup.num_tokens for _, output in outputs)
        return outputs

    def check_exact(self, outputs: Outputs) -> None:
        """Asserts that each output is the greedy continuation by transformers."""
        for prompt, output in outputs:
            logits = self._model.logits(prompt + output)[len(prompt) - 1 : -1]
            assert output == logits.argmax(-1).tolist()


@pytest.fixture(scope="module")
def outputs_alone() -> dict[tuple[Any, str], Outputs]:
    """The outputs of requests alone, by model and setup, in types without an oracle."""
    return {}


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_library")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETUPS)
async def test_outputs_of_every_variant(any_model, name, way, outputs_alone, in_process, start_engine, record_cell):
    setup, architecture = SETUPS[name], type(any_model.module).__name__
    if setup.backend == "transformers" and architecture in NOT_BY_TRANSFORMERS:
        pytest.skip("its attention cannot be replaced")
    record_cell(architecture, setup.backend)
    grid = Grid(any_model, setup, in_process, start_engine)
    outputs = await grid.run((way,))
    if setup.dtype in ("float32", "float64"):
        grid.check_exact(outputs)
        return
    key = any_model.path, name
    if key not in outputs_alone:
        outputs_alone[key] = await grid.run(("alone",), num_threads=1)
    assert all(output in outputs_alone[key] for output in outputs)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
async def test_outputs_of_every_variant_on_cuda(any_model, in_process, start_engine, record_cell):
    """All ways in one engine, since a model takes long to load."""
    pytest.importorskip("triton")
    record_cell(type(any_model.module).__name__, "cuda")
    grid = Grid(any_model, ON_CUDA, in_process, start_engine)
    grid.check_exact(await grid.run(("alone", "chunked", "cached", "preempted")))


def test_every_architecture_of_the_matrix_is_in_the_grid(variant_configs, same):
    in_grid = {name for config in variant_configs.values() for name in config["architectures"]}
    assert {same.get(name, name) for line in LINES for name in line.architectures} == in_grid
