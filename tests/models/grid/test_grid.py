"""The grid: every variant of every architecture on every backend, in several types and block sizes, with requests
that run by themselves, batched, chunked, cached and preempted. ``make soak`` runs it and prints a table.

In float32 and float64 the tokens are those of transformers. In other types, in which only the CPU backend promises the
same result in every batch, they are those of each request by itself.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from penstock.models.architecture.lines import LATENT, LINES
from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Setup:
    """How a model is loaded, and requests that its backend computes in a short time."""

    backend: str
    dtype: str = "float32"
    block_size: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (46, 30, 15, 31)
    """Of the prompts."""
    num_tokens: int = 12
    max_model_len: int = 96
    chunk: int = 32
    few_blocks: int = 10
    """Blocks of 16 tokens, which hold all prompts, but not their outputs."""

    def prompts(self, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
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
    # Without a GPU in Triton's interpreter, which is a thousand times slower.
    "cuda-float32": Setup(
        "cuda",
        config={"device": "cuda" if torch.cuda.is_available() else "cpu", "max_num_seqs": 4},
        lengths=(17, 15, 15),
        num_tokens=5,
        max_model_len=48,
        chunk=12,
        few_blocks=3,
    ),
}

RECURRENT = frozenset(
    {
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""The architectures with recurrent layers, which tests/models/hybrid has."""
NOT_BY_TRANSFORMERS = ("FalconForCausalLM", "Llama4ForCausalLM", "StableLmForCausalLM")
"""Architectures that the backend ``transformers`` refuses: their attention cannot be replaced, or is in chunks."""


Outputs = list[tuple[list[int], list[int]]]
"""Prompts and their outputs."""


@pytest.fixture
def run(any_model, in_process, start_engine):
    """Runs a setup's requests on the model, one at a time. With ``ways``, some run together, in chunks and with too few
    blocks, and one is sent again when its prefix is in the cache."""

    async def run(setup: Setup, num_threads: int, *, ways: bool) -> Outputs:
        executor = in_process(
            any_model.path,
            setup.few_blocks if ways else None,
            backend=setup.backend,
            dtype=setup.dtype,
            block_size=setup.block_size,
            max_model_len=setup.max_model_len,
            num_threads=num_threads,
            **setup.config,
        )
        limits = {"max_num_batched_tokens": setup.chunk} if ways else {}
        engine = await start_engine(executor, enable_prefix_caching=ways, **limits)
        alone, others = setup.prompts(1), setup.prompts(2)
        rounds = [[prompt] for prompt in alone]
        rounds += [others, others[:1], others[:1]] if ways else [[prompt] for prompt in others]
        outputs: Outputs = []
        cached = 0
        for together in rounds:
            answers = await engine.run(together, GREEDY, setup.num_tokens)
            outputs += [(prompt, answer.token_ids) for prompt, answer in zip(together, answers, strict=True)]
            cached += sum(answer.finished.usage.cached_tokens for answer in answers)
        if ways:
            assert max(len(plan.decodes) for plan in executor.plans) > 1
            assert any(chunk.start % setup.block_size for plan in executor.plans for chunk in plan.chunks)
            assert cached > 0
            assert engine.stats.preemptions > 0
        assert all(len(output) == setup.num_tokens for _, output in outputs)
        return outputs

    return run


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_library")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
async def test_outputs_of_every_variant(any_model, setup, run, record_cell):
    architecture = type(any_model.module).__name__
    if setup.backend == "transformers" and architecture in NOT_BY_TRANSFORMERS:
        pytest.skip("its attention cannot be replaced, or is in chunks")
    if architecture in LATENT and setup.backend == "transformers":
        pytest.skip("it has latent attention")
    if architecture in LATENT and setup.config.get("kv_cache_dtype") == "int8":
        setup = replace(setup, config={**setup.config, "kv_cache_dtype": "auto"})
    if setup.backend == "cuda":
        pytest.importorskip("triton", reason="needs Triton, which has wheels only for Linux")
    record_cell(architecture, setup.backend)
    outputs = await run(setup, 2, ways=True)
    if setup.dtype in ("float32", "float64"):
        for prompt, output in outputs:
            logits = any_model.logits(prompt + output)[len(prompt) - 1 : -1]
            assert output == logits.argmax(-1).tolist()
    else:
        alone = await run(setup, 1, ways=False)
        assert all(output in alone for output in outputs)


def test_every_architecture_of_the_matrix_is_in_the_grid(variant_configs, same):
    in_grid = {name for config in variant_configs.values() for name in config["architectures"]}
    in_matrix = {same.get(name, name) for line in LINES for name in line.architectures} - RECURRENT
    assert in_matrix == in_grid, "each needs a variant in variants.json, or a line in SAME in conftest.py here"
