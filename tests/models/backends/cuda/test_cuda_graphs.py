"""Steps of the backend for GPUs that are captured once and replayed on other inputs, and faults that only this finds.
Without a GPU, graphs are recordings of what Triton's interpreter and torch did."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.models.backends.base import load_backend
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from without_gpu.recorded_graphs import record_graphs

from penstock.kernels.cuda.example_shapes import SHAPES
from penstock.models.backends.cuda import backend
from penstock.models.backends.cuda.model import CudaModel
from penstock.models.backends.cuda.steps.graphs import StepGraphs, graph_sizes
from penstock.models.backends.cuda.steps.step_io import Size, StepInputs

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy's, in the interpreter
    pytest.mark.usefixtures("graphs"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"max_num_seqs": 2, "max_model_len": 64, "num_blocks": 24}
PROMPTS = ([3, 9, 1, 33, 9], [7, 2, 19, 30])
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=5, top_k=30, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.2, seed=7, repetition_penalty=1.4, bad_words=((1,), (3, 5)), logit_bias=((7, 2.5),)),
)
NUM_TOKENS = 2
MIXED = Size(2, 16, 2, 16)
"""A graph for steps with parts of prompts, which the interpreter does not have by itself."""


@pytest.fixture(scope="module")
def path(tmp_path_factory, build_model):
    """A model of one layer."""
    return build_model(tmp_path_factory.mktemp("one"), "LlamaConfig", {"num_hidden_layers": 1}).path


@pytest.fixture(scope="module")
def graphs():
    """Without a GPU, has the backend capture its steps and replay them."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            record_graphs(patch)
        patch.setattr(backend, "graph_sizes", lambda shape, device: [*graph_sizes(shape, device), MIXED])
        yield


@pytest.fixture(scope="module")
def load(path, worker_config, graphs):
    def make(**config: Any) -> Runner:
        return Runner(load_backend(worker_config(path, **{**SMALL, **config})))

    return make


@pytest.fixture(scope="module")
def ours(load):
    return load(backend="cuda", device=DEVICE)


@pytest.fixture(scope="module")
def reference(load):
    return load(backend="reference")


def generate(runner: Runner, shift: int) -> list[list[int]]:
    """The tokens of rows that start one after another, with parameters that ``shift`` changes, and end together."""
    rows = [
        AddedRow(n, 1, prompt, len(prompt), 0, [(4 * n + shift) % 24], SAMPLING[(n + shift) % len(SAMPLING)])
        for n, prompt in enumerate(PROMPTS)
    ]
    tokens: list[list[int]] = [[] for _ in rows]
    for step in range(len(rows) + NUM_TOKENS):
        added = rows[step : step + 1]
        decodes = [Decode(row.row, 1) for row in rows[:step]]
        prompts = [Chunk(row.row, 0, len(row.token_ids)) for row in added]
        result = runner.run(StepPlan(step, [], added, [], prompts, decodes))
        for of_row in result.rows:
            tokens[of_row.row] += of_row.token_ids
    runner.run(StepPlan(9, [row.row for row in rows], [], [], [], []))
    return tokens


def test_steps_that_are_replayed_choose_the_references_tokens(ours, reference, monkeypatch):
    used, run = [], StepGraphs.run

    def note(graphs, size, wait):
        used.append(size)
        return run(graphs, size, wait)

    monkeypatch.setattr(StepGraphs, "run", note)
    for shift in (0, 1):
        assert generate(ours, shift) == generate(reference, shift)
    assert {(size.tokens, size.longest) for size in used} >= {(2, 1), (MIXED.tokens, MIXED.longest)}


def test_graphs_that_were_dropped_are_captured_again(ours, reference):
    generate(ours, 0)
    ours._backend._memory.rows.on_moved()
    assert generate(ours, 1) == generate(reference, 1)


@pytest.mark.parametrize(("max_tokens", "most"), [(8192, 2048), (1500, 1024), (40, 0)])
def test_small_steps_with_prompts_are_captured(max_tokens, most):
    shape = replace(SHAPES["Qwen3-0.6B"], max_tokens=max_tokens)
    sizes = graph_sizes(shape, torch.device("cuda"))
    assert max((size.tokens for size in sizes if size.longest == size.tokens > 16), default=0) == most


@pytest.mark.skipif(DEVICE == "cuda", reason="what CUDA says of it is not what is tested here")
class TestPlanted:
    def test_a_pool_that_outlives_its_graphs_is_found(self, ours):
        graphs = ours._backend._graphs
        pool = graphs._pool
        graphs.clear()
        graphs._pool = pool
        with pytest.raises(AssertionError, match="freed with its last graph"):
            generate(ours, 0)

    def test_a_synchronisation_in_a_capture_is_found(self, load, monkeypatch):
        forward = CudaModel.forward

        def wait(model, step, *rest):
            assert int(step.query_starts[-1]) >= 0
            return forward(model, step, *rest)

        monkeypatch.setattr(CudaModel, "forward", wait)
        with pytest.raises(AssertionError, match="reads a number from the device"):
            load(backend="cuda", device=DEVICE)

    @pytest.mark.soak
    def test_a_value_of_the_capture_is_found(self, load, reference, monkeypatch):
        """As if something were copied before the graph, and not in it."""
        make = StepInputs.step

        def step_with_copy(inputs, size):
            step = make(inputs, size)
            with _disable_current_modes():
                return replace(step, given=step.given.clone())

        monkeypatch.setattr(StepInputs, "step", step_with_copy)
        assert generate(load(backend="cuda", device=DEVICE), 0) != generate(reference, 0)
