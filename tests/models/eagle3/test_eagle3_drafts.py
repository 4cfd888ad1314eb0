"""Whatever an EAGLE-3 head drafts, the answer is the one without it; and it drafts what it should."""

from functools import partial
from itertools import pairwise

import msgspec
import pytest
import torch

from penstock.models import eagle
from penstock.models.backend import load_backend
from penstock.models.checkpoint import resolve_model
from penstock.models.drafters import check_speculation, make_drafting
from penstock.models.drafting import Drafted, Drafting, Wanted
from penstock.models.launch import WorkerProcess
from penstock.models.runner import Runner
from penstock.models.step_costs import StepCosts
from penstock.models.train_demo.eagle3 import draft
from penstock.models.train_demo.export import read_head, read_model
from penstock.scheduler.plan import AddedRow, Chunk, Decode, DraftMethod, SamplingParams, SpeculationConfig, StepPlan

pytestmark = pytest.mark.usefixtures("cpu_library")

HIDDEN, HEADS, HEAD_DIM, BLOCK = 64, 3, 24, 16
LAYERS = (0, 2, 4)


def features_of(target, token_ids):
    """(T, 3 * hidden)."""
    with torch.inference_mode():
        states = target.module(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in LAYERS], 1)


class Watched(Drafting):
    """All that is proposed is drafted, whatever it costs; and what it was after which histories."""

    def __init__(self, drafter):
        super().__init__(drafter, 8, StepCosts(2048), runs_ahead=False, clock=lambda: 0.0)
        self._propose = drafter.propose
        self.proposed = []

    def choose(self, table, plan):
        return [Wanted(table[decode.row], decode.max_tokens - 1) for decode in plan.decodes]

    def draft(self, wanted, plan):
        drafts = {}
        for (row, most), (token_ids, confidences) in zip(wanted, self._propose(wanted), strict=True):
            assert len(token_ids) == len(confidences) == most
            self.proposed.append((list(row.history), most, token_ids))
            drafts[row.number] = token_ids
        return Drafted(drafts)


def start(config, with_head=True):
    config = check_speculation(config)
    backend = load_backend(config)
    drafting = Watched(eagle.load(config, backend)) if with_head else None
    return Runner(backend, drafting), drafting


def added(number, prompt, first_block, sampling, num_computed=0):
    blocks = list(range(first_block, first_block + 6))
    return AddedRow(number, 0, prompt, len(prompt), num_computed, blocks, sampling, max_drafts=8)


def decode(runner, rows, num_tokens, num_drafts):
    """Continues rows, given with what they have so far, until they have so many tokens."""
    steps = 0
    while short := [number for number, tokens in rows.items() if len(tokens) < num_tokens]:
        plan = StepPlan(steps, [], [], [], [], [Decode(n, num_drafts + 1) for n in short], max_drafts=8 * num_drafts)
        for result in runner.run(plan).rows:
            rows[result.row] += result.token_ids
        steps += 1
    return steps


SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(seed=4, frequency_penalty=0.3))


def answers(runner, prompts, num_drafts, num_tokens=30):
    """Prompts of which the last one comes in three chunks while others decode."""
    blocks = range(0, 60, 6)
    long = len(prompts) - 1
    rows = [added(n, prompt, blocks[n], SAMPLINGS[n]) for n, prompt in enumerate(prompts)]
    chunks = [Chunk(n, 0, len(prompt)) for n, prompt in enumerate(prompts[:long])]
    tokens = {row.row: row.token_ids for row in runner.run(StepPlan(0, [], rows, [], chunks, [])).rows}
    for begin, end in ((0, 7), (7, 33), (33, len(prompts[long]))):
        decodes = [Decode(n, num_drafts + 1) for n in range(long)]
        for result in runner.run(StepPlan(0, [], [], [], [Chunk(long, begin, end)], decodes, max_drafts=9)).rows:
            tokens[result.row] = tokens.get(result.row, []) + result.token_ids
    decode(runner, tokens, num_tokens, num_drafts)
    return {number: some[:num_tokens] for number, some in tokens.items()}


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
    assert told == answers(Runner(backend, make_drafting(config, backend)), some, 3)  # as it is worth the while
    lengths = {len(history) for history, _, _ in watched.proposed}
    assert len(watched.proposed) > 40, "every step of every row"
    assert any(length % BLOCK == 1 for length in lengths)
    for history, most, drafts in watched.proposed[::5]:
        assert drafts == head.drafts(features_of(target, history)[:-1], history, most)


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


def test_the_demo_models_head_drafts_what_its_training_says(worker_config):
    demo, head = resolve_model("demo"), resolve_model("demo_eagle3")
    speculation = SpeculationConfig(DraftMethod.EAGLE3, 3, model=str(head))
    runner, watched = start(worker_config(demo, backend="cpu", speculation=speculation, max_model_len=512))
    # What the model writes after anything is easier to guess than what was made up.
    told = answers(runner, [[300, 301, 302], [7], list(range(500, 540))], 3, num_tokens=40)
    num_steps = len(watched.proposed)
    assert sum(map(len, told.values())) > 1.3 * num_steps
    target, trained = read_model(demo), read_head(head)
    for history, most, drafts in watched.proposed[::7]:
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
        worker.submit(StepPlan(0, [], [added(0, [5, 6, 7], 0, SAMPLINGS[0])], [], [Chunk(0, 0, 3)], []))
        results = worker.results()
        tokens = [*(await anext(results)).rows[0].token_ids]
        num_drafted = 0
        for step in range(1, 12):
            worker.submit(StepPlan(step, [], [], [], [], [Decode(0, 4)], max_drafts=3))
            [row] = (await anext(results)).rows
            tokens += row.token_ids
            num_drafted += row.num_drafted
        assert all(token == after[before] for before, token in pairwise([7, *tokens]))
        assert len(tokens) == 12 + num_drafted > 12
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
        [(history, most, tokens)] = watched.proposed
        assert most == 3
        return history, tokens

    def expected(history, begin):
        return head.drafts(features_of(target, history)[begin:-1], history[begin:], 3)

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
