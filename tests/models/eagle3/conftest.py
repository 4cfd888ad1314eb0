"""EAGLE-3 heads in directories, for small models, and what they compute in plain torch."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from penstock.kernels.reference.sampling import keyed_gumbel
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 160, 64, 56, 3, 1, 24
DRAFTED = 90
LAYERS = (0, 2, 4)
EPS, THETA = 1e-5, 5000.0
BLOCK = 16
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": THETA,
    "num_hidden_layers": 1, "max_position_embeddings": 2048, "draft_vocab_size": DRAFTED, "torch_dtype": "float32",
    "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
}  # fmt: skip


@dataclass
class Head:
    """A head in a directory, and what it computes."""

    path: Path
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor

    @property
    def target_ids(self) -> torch.Tensor:
        return self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))

    def norm(self, x, name):
        return functional.rms_norm(x, x.shape[-1:], self.tensors[name], EPS)

    def rotate(self, x):
        """(heads, T, head size), position by position."""
        half = HEAD_DIM // 2
        frequencies = THETA ** -(torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def layer(self, token_ids, g):
        """(T,) and (T, hidden) -> (T, hidden), before the last norm."""
        t = self.tensors
        embedded = self.norm(self.embedding[torch.tensor(token_ids)], "midlayer.input_layernorm.weight")
        joined = torch.cat((embedded, self.norm(g, "midlayer.hidden_norm.weight")), 1)
        q, k, v = (
            functional.linear(joined, t[f"midlayer.self_attn.{name}_proj.weight"]).view(len(g), -1, HEAD_DIM)
            for name in "qkv"
        )
        q, k, v = self.rotate(q.transpose(0, 1)), self.rotate(k.transpose(0, 1)), v.transpose(0, 1)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = g + functional.linear(mixed, t["midlayer.self_attn.o_proj.weight"])
        y = self.norm(x, "midlayer.post_attention_layernorm.weight")
        gate, up = (functional.linear(y, t[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + functional.linear(functional.silu(gate) * up, t["midlayer.mlp.down_proj.weight"])

    def choice(self, x, sampling, position):
        """(1, hidden) -> a token as the model numbers them, its probability, and the noise it was drawn with."""
        logits = self.norm(x, "norm.weight")[0] @ self.tensors["lm_head.weight"].T
        noise = torch.zeros(len(logits))
        if sampling.temperature:
            noise = keyed_gumbel(torch.tensor(sampling.seed), torch.tensor(position), self.target_ids)
        chosen = int((logits / (sampling.temperature or 1) + noise).argmax())
        return int(self.target_ids[chosen]), float(logits.softmax(0)[chosen]), float(noise[chosen])

    def drafts(self, features, history, count, sampling):
        """After a history: ``features`` are of all its positions but the newest."""
        tokens, g = list(history[1:]), features @ self.tensors["fc.weight"].T
        found = []
        for position in range(len(history), len(history) + count):
            x = self.layer(tokens, g)[-1:]
            found.append(self.choice(x, sampling, position)[0])
            tokens, g = [*tokens, found[-1]], torch.cat((g, x))
        return found


def random_tensors(seed=5):
    """By their published names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        drawn = torch.randn(shape, generator=generator)
        return drawn / 4 if len(shape) == 2 else 1 + drawn / 3

    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFTED]
    return {
        **{f"midlayer.{name}.weight": draw(HIDDEN) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": draw(HIDDEN),
        "midlayer.self_attn.q_proj.weight": draw(query, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": draw(kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": draw(kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": draw(HIDDEN, query),
        "midlayer.mlp.gate_proj.weight": draw(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": draw(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": draw(HIDDEN, INNER),
        "norm.weight": draw(HIDDEN),
        "fc.weight": draw(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": draw(DRAFTED, HIDDEN),
        "d2t": ids - torch.arange(DRAFTED),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True),
    }


def save_head(path, tensors, embedding, **config):
    """``embedding``: the model's, which it uses if it has none."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**SIZES, **config}))
    save_file(tensors, path / "model.safetensors")
    return Head(path, tensors, tensors.get("embed_tokens.weight", embedding))


@pytest.fixture(scope="module", params=["tied", "untied", "own-embedding"])
def target_and_head(request, build_model, tmp_path_factory):
    """A model, and a random head for it."""
    path = tmp_path_factory.mktemp(request.param)
    changes = {"num_hidden_layers": 5, "tie_word_embeddings": request.param == "tied"}
    target = build_model(path / "model", "Qwen3Config", changes)
    tensors = random_tensors()
    if request.param == "own-embedding":
        tensors["embed_tokens.weight"] = random_tensors(6)["fc.weight"].T[:VOCAB].contiguous()
    return target, save_head(path / "head", tensors, target.module.model.embed_tokens.weight.detach())


@pytest.fixture(name="random_tensors")
def random_tensors_fixture():
    """For test modules, which cannot import a conftest."""
    return random_tensors


@pytest.fixture(name="save_head")
def save_head_fixture():
    """Likewise."""
    return save_head


@pytest.fixture
def eagle_config(worker_config):
    """Of a worker on a model with a head."""

    def make(target, head, backend, num_drafts=3, **config):
        speculation = SpeculationConfig(DraftMethod.EAGLE3, num_drafts, model=str(head.path))
        config = {"max_model_len": 512, **config}
        return worker_config(target.path, backend=backend, speculation=speculation, **config)

    return make
