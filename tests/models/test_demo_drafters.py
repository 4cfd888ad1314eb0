"""The demo model's two drafters as they are shipped: files, formats, and that they guess what the demo model writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from penstock.models.checkpoint.checkpoint import check_checkpoint, resolve_model
from penstock.models.train_demo.eagle3 import Head, draft, target_states, unrolled
from penstock.models.train_demo.evaluate_drafts import (
    WrittenText,
    count_accepted,
    head_drafter,
    model_drafter,
)
from penstock.models.train_demo.export import read_head, read_model
from penstock.models.train_demo.network import Decoder, rotary_tables

DEMO = resolve_model("demo")
SIBLING, EAGLE3 = DEMO.with_name("demo_draft"), DEMO.with_name("demo_eagle3")
HELD_OUT = Path(__file__).parent / "heldout.jsonl"


@pytest.fixture(scope="module")
def demo() -> Decoder:
    return read_model(DEMO)


@pytest.fixture(scope="module")
def head() -> Head:
    return read_head(EAGLE3)


@pytest.fixture(scope="module")
def outputs(demo: Decoder) -> list[WrittenText]:
    """What the demo model writes greedily after the beginnings of held-out documents."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()[:4]]
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids[:32] for text in texts])
    with torch.inference_mode():
        for length in range(32, 56):
            logits = demo(ids, *rotary_tables(demo.shape, length))
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    return [WrittenText("documents", row, 32, None) for row in ids]


def read_json(file: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(file.read_text())
    return found


def test_the_sibling_is_a_small_model_with_the_demo_models_ids() -> None:
    demo, sibling = check_checkpoint(DEMO), check_checkpoint(SIBLING)
    assert sibling.spec.vocab_size == demo.spec.vocab_size
    assert {entry.dtype for entry in sibling.tensors.values()} == {"BF16"}
    assert (SIBLING / "model.safetensors").stat().st_size < 2.1e6
    assert read_json(SIBLING / "generation_config.json") == read_json(DEMO / "generation_config.json")
    same = ("architectures", "model_type", "head_dim", "rope_theta", "max_position_embeddings", "eos_token_id")
    ours, theirs = sibling.config, demo.config
    assert [ours[name] for name in same] == [theirs[name] for name in same]


def test_the_head_is_in_the_published_format() -> None:
    config = read_json(EAGLE3 / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    hidden, inner, vocab, drafts, size = (
        int(str(config[name]))
        for name in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size", "head_dim")
    )
    queries = int(str(config["num_attention_heads"])) * size
    keys = int(str(config["num_key_value_heads"])) * size
    with safe_open(EAGLE3 / "model.safetensors", framework="pt") as file:
        found = {name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    assert found == {
        "d2t": ([drafts], "I64"),
        "t2d": ([vocab], "BOOL"),
        "fc.weight": ([hidden, 3 * hidden], "BF16"),
        "lm_head.weight": ([drafts, hidden], "BF16"),
        "midlayer.hidden_norm.weight": ([hidden], "BF16"),
        "midlayer.input_layernorm.weight": ([hidden], "BF16"),
        "midlayer.mlp.down_proj.weight": ([hidden, inner], "BF16"),
        "midlayer.mlp.gate_proj.weight": ([inner, hidden], "BF16"),
        "midlayer.mlp.up_proj.weight": ([inner, hidden], "BF16"),
        "midlayer.post_attention_layernorm.weight": ([hidden], "BF16"),
        "midlayer.self_attn.k_proj.weight": ([keys, 2 * hidden], "BF16"),
        "midlayer.self_attn.o_proj.weight": ([hidden, queries], "BF16"),
        "midlayer.self_attn.q_proj.weight": ([queries, 2 * hidden], "BF16"),
        "midlayer.self_attn.v_proj.weight": ([keys, 2 * hidden], "BF16"),
        "norm.weight": ([hidden], "BF16"),
    }
    assert vocab == read_json(DEMO / "config.json")["vocab_size"]
    assert (EAGLE3 / "model.safetensors").stat().st_size < 2.1e6


def test_the_heads_two_maps_name_the_same_ids(head: Head) -> None:
    """d2t is what is added to a row of the head's logits to give the target's id; t2d says which ids there are."""
    ids = head.draft_ids.tolist()
    assert ids == sorted(set(ids))
    assert ids == [token for token, known in enumerate(head.t2d.tolist()) if known]
    assert head.draft_ids.equal(torch.arange(len(ids)) + head.d2t)
    assert len(ids) < head.shape.vocab_size


def test_the_heads_layer_is_llamas_with_wider_rows(head: Head) -> None:
    """Against transformers: rotation, scale and mask of the attention, and the MLP."""
    shape = head.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    config._attn_implementation = "sdpa"  # causal where there is no mask
    ours, theirs = head.midlayer, LlamaAttention(config, layer_idx=0)
    theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj = (
        getattr(ours.self_attn, f"{name}_proj") for name in "qkvo"
    )
    mlp = LlamaMLP(config)
    mlp.load_state_dict(ours.mlp.state_dict())
    generator = torch.Generator().manual_seed(1)
    embeds, hidden = torch.randn(2, 1, 9, shape.hidden_size, generator=generator)
    cos, sin = rotary_tables(shape, 9)
    with torch.inference_mode():
        rows = torch.cat((ours.input_layernorm(embeds), ours.hidden_norm(hidden)), dim=-1)
        mixed, _ = theirs(rows, position_embeddings=(cos[None], sin[None]), attention_mask=None)
        x = hidden + mixed
        torch.testing.assert_close(
            ours(embeds, hidden, cos, sin, []), x + mlp(ours.post_attention_layernorm(x)), rtol=1e-4, atol=1e-4
        )


def test_unrolling_over_a_text_gives_the_drafts_of_every_prefix(
    demo: Decoder, head: Head, outputs: list[WrittenText]
) -> None:
    """What training and the figures rest on: the drafts of many prefixes at once are those of one after the other."""
    prompt = outputs[0].ids[:20].tolist()
    drafts = draft(head, demo, prompt, 5)
    assert drafts[:3] == draft(head, demo, prompt, 3)
    ids = torch.tensor([[*prompt, *drafts, 0]])
    tables = rotary_tables(head.shape, ids.shape[1])
    with torch.inference_mode():
        features, _ = target_states(demo, ids, *tables, head.shape.aux_layers)
        rows = [part[0, 18] for part in unrolled(head, features, demo.model.embed_tokens(ids), *tables, 5)]
    assert [int(head.draft_ids[row.argmax()]) for row in rows] == drafts


def test_a_step_ends_at_the_first_wrong_draft() -> None:
    hits = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 0, 0], dtype=torch.bool)
    right = hits.unfold(0, 3, 1)
    # Steps begin at 2 and 5; with one draft each, at 2, 4, 5 and 7.
    assert count_accepted(right, 2, 3) == (5, 2)
    assert count_accepted(right, 2, 1) == (3, 4)


@pytest.mark.parametrize("which", ["sibling", "head"])
def test_a_drafter_guesses_what_the_demo_model_writes(
    which: str, demo: Decoder, head: Head, outputs: list[WrittenText]
) -> None:
    """Far above chance, which is 1 in 4,096; the cards have the figures."""
    drafter = model_drafter(read_model(SIBLING)) if which == "sibling" else head_drafter(head, demo)
    with torch.inference_mode():
        first = torch.cat([drafter(output)[output.start :, 0] for output in outputs]).float().mean()
        own = torch.cat([model_drafter(demo)(output)[output.start :, 0] for output in outputs]).float().mean()
    assert own > 0.98
    assert first > 0.25
