"""Whatever an EAGLE-3 head drafts, the answer is the one without it; and it drafts what it should."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import torch
from heads.runners import SAMPLINGS, added, answers, decode, few_answers, few_rows, start

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import resolve_model
from penstock.models.executor.process import WorkerProcess
from penstock.models.train_demo.eagle3 import draft
from penstock.models.train_demo.export import read_head, read_model
from penstock.models.worker.runner import Runner
from penstock.models.worker.speculation import check_speculation, make_controller
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan, StepResult
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

pytestmark = pytest.mark.usefixtures("cpu_library")

HIDDEN, HEADS, HEAD_DIM, BLOCK = 64, 3, 24, 16
LAYERS = (0, 2, 4)


def features_of(target, token_ids, layers=LAYERS):
    """(T, 3 * hidden)."""
    with torch.inference_mode():
        states = target.module(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], 1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_drafts_are_those_of_plain_torch_and_change_no_answer(target_and_head, eagle_config, prompts, backend):
    target, head = target_and_head
    some = [prompts[4], prompts[1], prompts[5]]
    config = eagle_config(target, head, backend)
    runner, watched = start(config)
    told = answers(runner, some, 3)
    plain, _ = start(config, with_head=False)
    assert told == answers(plain, some, 0)
    backend = load_backend(check_speculation(config))
    assert told == answers(Runner(backend, make_controller(config, backend)), some, 3)  # as it is worth the while
    lengths = {len(history) for history, *_ in watched.proposed}
    assert len(watched.proposed) > 40, "every step of every row"
    assert any(length % BLOCK == 1 for length in lengths)
    for history, most, drafts, sampling in watched.proposed[::5]:
        assert drafts == head.drafts(features_of(target, history)[:-1], history, most, sampling)


# Interpreted where there is no GPU, so there is less of all.
FEW: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_bytes": 1 << 20}
FEW_LAYERS = (0, 1, 2)


@pytest.fixture
def on_gpu(build_model, tmp_path, eagle_config, random_tensors, save_head):
    """A model, a head, a runner with it, and one without on the reference. Nothing is compiled once they are loaded."""
    pytest.importorskip("triton")
    from penstock.kernels.cuda.core.launch import launches

    target = build_model(tmp_path / "model", "Qwen3Config", {"num_hidden_layers": 3})
    embedding = target.module.model.embed_tokens.weight.detach()
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": FEW_LAYERS}}
    head = save_head(tmp_path / "head", random_tensors(), embedding, **named)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, _ = start(eagle_config(target, head, "reference", **FEW), with_head=False)
    drafted = start(eagle_config(target, head, "cuda", device=device, **FEW))
    late = launches.late
    yield target, head, drafted, plain
    assert launches.late == late


def test_drafts_on_gpus(on_gpu, prompts):
    target, head, (runner, watched), plain = on_gpu
    assert few_answers(runner, prompts[5], 2) == few_answers(plain, prompts[5], 0)
    assert {sampling for *_, sampling in watched.proposed} == {SAMPLINGS[0], SAMPLINGS[1]}
    for history, most, drafts, sampling in watched.proposed:
        assert drafts == head.drafts(features_of(target, history, FEW_LAYERS)[:-1], history, most, sampling)


@pytest.mark.soak
def test_drafts_while_another_thread_waits_for_steps(on_gpu, prompts):
    """As in a worker: plans without drafts begin while the one before is computed, and is read."""
    target, head, (runner, watched), plain = on_gpu
    rows = few_rows(prompts[5])
    plans = [StepPlan(0, [], rows, [], [Chunk(0, 0, 5), Chunk(1, 0, 9)], [])]
    plans.append(StepPlan(1, [], [], [], [Chunk(1, 9, 14)], [Decode(0, 1)]))
    for step in range(2, 8):
        num_drafts = 2 * (step % 3 == 0)
        decodes = [Decode(n, num_drafts + 1) for n in (0, 1)]
        plans.append(StepPlan(step, [], [], [], [], decodes, max_drafts=2 * num_drafts))
    told: dict[int, list[int]] = {0: [], 1: []}

    def take(finishes):
        while (finish := finishes.get()) is not None:
            for result in finish().rows:
                told[result.row] += result.token_ids

    finishes: SimpleQueue[Callable[[], StepResult] | None] = SimpleQueue()
    with ThreadPoolExecutor() as threads:
        taken = threads.submit(take, finishes)
        for plan in plans:
            finishes.put(runner.start_step(plan))
        finishes.put(None)
        taken.result()
    assert len(watched.proposed) == 4
    for history, most, drafts, sampling in watched.proposed:
        assert drafts == head.drafts(features_of(target, history, FEW_LAYERS)[:-1], history, most, sampling)
    first = plain.run(StepPlan(0, [], rows, [], [Chunk(0, 0, 5), Chunk(1, 0, 14)], []))
    expected = {row.row: row.token_ids for row in first.rows}
    decode(plain, expected, 16, 0)
    assert told == {number: some[: len(told[number])] for number, some in expected.items()}


def knowing_target_and_head(path, build_model, random_tensors, save_head):
    """A model whose next token follows from the newest alone, by a permutation, and a head that knows it: embeddings
    are one-hot, the model's layers add nothing, and the head's MLP turns a token's vector into the next one's."""
    size = HIDDEN
    target = build_model(
        path / "model", "LlamaConfig", {"vocab_size": size, "num_hidden_layers": 5, "tie_word_embeddings": False}
    )
    chance = torch.Generator().manual_seed(2)
    after = torch.randperm(size, generator=chance)
    turn = torch.eye(size)[after].T.contiguous()  # the vector of t to the one of after[t]
    with torch.no_grad():
        for name, parameter in target.module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        target.module.model.norm.weight.fill_(1)
        target.module.model.embed_tokens.weight.copy_(torch.eye(size))
        target.module.lm_head.weight.copy_(turn)
    target.module.save_pretrained(target.path)
    tensors = random_tensors()
    normed = size**0.5  # of a one-hot vector after a norm without weights
    ids = torch.arange(size - 1, -1, -1)
    tensors.update(
        {
            "midlayer.self_attn.o_proj.weight": torch.zeros(HIDDEN, HEADS * HEAD_DIM),
            "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
            "midlayer.mlp.gate_proj.weight": torch.eye(size),
            "midlayer.mlp.up_proj.weight": torch.eye(size),
            "midlayer.mlp.down_proj.weight": (turn - torch.eye(size))
            / (normed**2 * torch.sigmoid(torch.tensor(normed))),
            "norm.weight": torch.ones(HIDDEN),
            "fc.weight": torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), 1),
            "lm_head.weight": turn[ids],
            "d2t": ids - torch.arange(size),
            "t2d": torch.ones(size, dtype=torch.bool),
        }
    )
    config = {"vocab_size": size, "draft_vocab_size": size, "intermediate_size": size}
    return target, save_head(path / "head", tensors, torch.eye(size), **config), after.tolist()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_head_that_knows_the_answer_saves_steps(
    backend, tmp_path, build_model, eagle_config, random_tensors, save_head
):
    target, head, after = knowing_target_and_head(tmp_path, build_model, random_tensors, save_head)
    runner, _ = start(eagle_config(target, head, backend))
    prompt = list(range(20))
    rows = [added(0, prompt, 0, SAMPLINGS[0]), added(1, prompt[:3], 6, SAMPLINGS[0])]
    first = runner.run(StepPlan(0, [], rows, [], [Chunk(0, 0, 20), Chunk(1, 0, 3)], [])).rows
    tokens = {row.row: row.token_ids for row in first}
    assert decode(runner, tokens, 41, 3) == 10
    for number, length in ((0, 20), (1, 3)):
        chain = [after[prompt[length - 1]]]
        while len(chain) < 41:
            chain.append(after[chain[-1]])
        assert tokens[number] == chain


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_is_drawn_is_drafted_with_the_same_noise(
    backend, tmp_path, build_model, eagle_config, random_tensors, save_head
):
    """A head that has the model's distribution finds its choice, likely or not, as long as the token before was one
    that it expected."""
    target, head, after = knowing_target_and_head(tmp_path, build_model, random_tensors, save_head)
    runner, watched = start(eagle_config(target, head, backend))
    prompt, hot = list(range(20)), SamplingParams(temperature=2.0, seed=(1 << 64) - 5)
    plan = StepPlan(0, [], [added(0, prompt, 0, hot)], [], [Chunk(0, 0, 20)], [])
    tokens = {0: runner.run(plan).rows[0].token_ids}
    decode(runner, tokens, 61, 3)
    told = prompt + tokens[0]
    drafts = {len(history): token_ids[0] for history, _, token_ids, _ in watched.proposed}
    known = {at: draft for at, draft in drafts.items() if told[at - 1] == after[told[at - 2]]}
    assert known == {at: told[at] for at in known}
    unlikely = [draft for at, draft in known.items() if draft != after[told[at - 1]]]
    assert 5 < len(unlikely) < len(known) - 5


def test_the_demo_models_head_drafts_as_trained(worker_config):
    demo, head = resolve_model("demo"), resolve_model("demo_eagle3")
    speculation = SpeculationConfig(DraftMethod.EAGLE3, 3, model=str(head))
    runner, watched = start(worker_config(demo, backend="cpu", speculation=speculation, max_model_len=512))
    # What the model writes after anything is easier to guess than what was made up.
    told = answers(runner, [[300, 301, 302], [7], list(range(500, 540))], 3, num_tokens=40)
    num_steps = len(watched.proposed)
    assert sum(map(len, told.values())) > 1.3 * num_steps
    target, trained = read_model(demo), read_head(head)
    greedy = [proposed[:3] for proposed in watched.proposed if not proposed[3].temperature]
    for history, most, drafts in greedy[::7]:
        assert drafts == draft(trained, target, history, most)


async def test_a_worker_drafts_with_a_head(tmp_path, build_model, eagle_config, random_tensors, save_head):
    target, head, after = knowing_target_and_head(tmp_path, build_model, random_tensors, save_head)
    config = eagle_config(target, head, "cpu", kv_cache_bytes=8 << 20)
    without = load_backend(msgspec.structs.replace(config, speculation=None)).facts
    worker = WorkerProcess(config)
    facts = await worker.start()
    try:
        block_bytes = without.kv_bytes // without.num_blocks + 2 * HEAD_DIM * 4 * BLOCK
        assert facts.num_blocks == (8 << 20) // block_bytes
        results, num_drafted, epoch = worker.results(), 0, 0
        while not num_drafted and epoch < 1000:  # whether a row has drafts is decided by what takes how long
            begun = added(0, [5, 6, 7], 0, SAMPLINGS[0])
            begun.epoch, epoch = epoch, epoch + 1
            worker.submit(StepPlan(0, [0] * (epoch > 1), [begun], [], [Chunk(0, 0, 3)], []))
            tokens = [*(await anext(results)).rows[0].token_ids]
            for step in range(1, 21):
                worker.submit(StepPlan(step, [], [], [], [], [Decode(0, 4)], max_drafts=3))
                [row] = (await anext(results)).rows
                tokens += row.token_ids
                num_drafted += row.num_drafted
            assert all(token == after[before] for before, token in pairwise([7, *tokens]))
        assert len(tokens) == 21 + num_drafted > 21
    finally:
        await worker.stop()


def test_who_shares_a_prefix_shares_what_the_head_read_of_it(target_and_head, eagle_config, prompts):
    """Where nothing is left of that, the head begins behind the prefix, and whoever shares that begins there too."""
    target, head = target_and_head
    runner, watched = start(eagle_config(target, head, "cpu"))
    prompt = prompts[6]  # four blocks
    row = partial(added, prompt=prompt, sampling=SAMPLINGS[0])
    again = [Chunk(0, 48, 64)]

    def drafts(plans):
        watched.proposed.clear()
        for plan in plans:
            runner.run(plan)
        decoding = StepPlan(0, [], [], [], [], [Decode(0, 4)], max_drafts=3)
        runner.run(decoding)
        [(history, most, tokens, _)] = watched.proposed
        assert most == 3
        return history, tokens

    def expected(history, begin):
        return head.drafts(features_of(target, history)[begin:-1], history[begin:], 3, SAMPLINGS[0])

    history, tokens = drafts([StepPlan(0, [], [row(0, first_block=0)], [], [Chunk(0, 0, 64)], [])])
    assert tokens == expected(history, 0)
    history, tokens = drafts([StepPlan(0, [0], [row(0, first_block=0, num_computed=48)], [], again, [])])
    assert tokens == expected(history, 0)
    # The model has computed the prefix, and the head has not read it: a row without drafts did.
    unread = msgspec.structs.replace(row(0, first_block=8), max_drafts=0)
    whole = StepPlan(0, [0], [unread], [], [Chunk(0, 0, 64)], [])
    for num_computed in (32, 48):
        chunk = [Chunk(0, num_computed, 64)]
        plan = StepPlan(0, [0], [row(0, first_block=8, num_computed=num_computed)], [], chunk, [])
        history, tokens = drafts([whole, plan] if num_computed == 32 else [plan])
        assert tokens == expected(history, 32)
    # Two blocks that the head has are another row's now: the rest of the prefix is of no use without them.
    taken = AddedRow(1, 0, prompt[:20], 20, 0, [0, 1], SAMPLINGS[0])
    plans = [
        StepPlan(0, [0], [taken], [], [Chunk(1, 0, 20)], []),
        StepPlan(0, [1], [msgspec.structs.replace(row(0, first_block=0), max_drafts=0)], [], [Chunk(0, 0, 64)], []),
        StepPlan(0, [0], [row(0, first_block=0, num_computed=48)], [], again, []),
    ]
    history, tokens = drafts(plans)
    assert tokens == expected(history, 48)
