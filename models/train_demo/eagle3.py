"""An EAGLE-3 head as a trainable network with the published checkpoints' parameter names, and a reference for drafting.

The head predicts the target model's output from values that the target computes anyway: the inputs of three of its
layers, at every position before the newest token. Each row belongs to a position t: its inputs are the features of t
and the embedding of token t + 1, and its output is the logits of token t + 2. If the features are not known yet, as for
the second and later drafts, the previous row's output replaces them. Training therefore unrolls several drafts
("training-time test"). See https://arxiv.org/abs/2503.01840; layers are numbered as in vLLM.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.models.train_demo.network import (
    MLP,
    Decoder,
    DecoderShape,
    Network,
    RMSNorm,
    init_weights,
    rotary_tables,
    rotate,
)

Past = list[tuple[Tensor, Tensor]]
"""Keys and values of the drafts so far, each `(batch, heads, rows, head_dim)`."""


@dataclass(frozen=True)
class HeadShape(DecoderShape):
    """The sizes of a head. Head size and rotary base are the target's, so both use the same rotary tables."""

    intermediate_size: int = 192
    num_layers: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    draft_vocab_size: int = 2048
    aux_layers: tuple[int, ...] = (1, 3, 5)
    """The target's layers whose inputs are the features: the residual stream before the layer's norm."""


def unrolled_attention(q: Tensor, past: Past) -> Tensor:
    """Returns softmax(q k^T / sqrt(head_dim)) v. Row t attends to rows 0..t of the first draft and to row t of each
    later one."""
    (keys, values), *later = past
    length = q.shape[-2]
    mask = torch.full((length, length), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = [q @ keys.transpose(-1, -2) + mask, *((q * k).sum(-1, keepdim=True) for k, _ in later)]
    weights = (torch.cat(scores, dim=-1) * q.shape[-1] ** -0.5).softmax(-1)
    mixed: Tensor = weights[..., :length] @ values
    for number, (_, v) in enumerate(later, length):
        mixed = mixed + weights[..., number, None] * v
    return mixed


class HeadAttention(nn.Module):
    """Grouped-query attention whose rows are a normalised embedding and a normalised feature, concatenated."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        heads = (*x.shape[:-1], -1, self.shape.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.shape.num_heads // self.shape.num_kv_heads
        past.append((k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)))
        out: Tensor = self.o_proj(unrolled_attention(q, past).transpose(1, 2).flatten(2))
        return out


class MidLayer(nn.Module):
    """x = hidden + attention([norm(embeds), norm(hidden)]); x + mlp(norm(x))."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        rows = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        x = hidden + self.self_attn(rows, cos, sin, past)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(Network):
    """The head. It uses the target's token embeddings. `draft_ids` are the ids that it can draft, ascending."""

    shape: HeadShape
    d2t: Tensor
    """The number to add to an index of the logits to get the target's id, int64."""
    t2d: Tensor
    """True for the target's ids that can be drafted, bool."""

    def __init__(self, shape: HeadShape, draft_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.midlayer = MidLayer(shape)
        self.fc = nn.Linear(len(shape.aux_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        init_weights(self)
        self.register_buffer("d2t", draft_ids - torch.arange(shape.draft_vocab_size))
        self.register_buffer(
            "t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, value=True)
        )

    @property
    def draft_ids(self) -> Tensor:
        """The target's id of each row of logits."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Returns outputs `(batch, rows, hidden_size)`, not normalised, and logits `(batch, rows, draft_vocab_size)`.
        `hidden` is the output of `fc` or of an earlier call; both inputs have the outputs' shape. Appends the keys and
        values to `past`."""
        out = self.midlayer(embeds, hidden, cos, sin, past)
        return out, self.lm_head(self.norm(out))


def target_states(
    target: Decoder, tokens: Tensor, cos: Tensor, sin: Tensor, layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns a target's features `(batch, length, len(layers) * hidden_size)` and logits `(batch, length,
    vocab_size)`."""
    trunk = target.model
    x = trunk.embed_tokens(tokens)
    features = []
    for number, layer in enumerate(trunk.layers):
        if number in layers:
            features.append(x)
        x = layer(x, cos, sin)
    return torch.cat(features, dim=-1), functional.linear(trunk.norm(x), trunk.embed_tokens.weight)


def unrolled(
    head: Head, features: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, num_drafts: int
) -> Iterator[Tensor]:
    """Yields the logits of drafts 1 to `num_drafts` after every prefix. Earlier drafts are taken from the text itself.

    `features` and `embeds` cover tokens 0 to n - 1. Each draft's logits are `(batch, n - num_drafts,
    draft_vocab_size)`; row t of draft s + 1 predicts token t + 2 + s.
    """
    rows = features.shape[1] - num_drafts
    hidden = head.fc(features[:, :rows])
    past: Past = []
    for s in range(num_drafts):
        hidden, logits = head(embeds[:, s + 1 : s + 1 + rows], hidden, cos[s : s + rows], sin[s : s + rows], past)
        yield logits


@torch.inference_mode()
def draft(head: Head, target: Decoder, tokens: Sequence[int], num_drafts: int) -> list[int]:
    """Returns the likeliest tokens after `tokens`, each given the previous ones. Uses no KV cache."""
    ids = torch.tensor([tokens])
    known = len(tokens) - 1  # the newest token has no features yet
    cos, sin = rotary_tables(head.shape, known + num_drafts)
    hidden = head.fc(target_states(target, ids[:, :known], cos[:known], sin[:known], head.shape.aux_layers)[0])
    for rows in range(known, known + num_drafts):
        out, logits = head(target.model.embed_tokens(ids[:, 1:]), hidden, cos[:rows], sin[:rows], past=[])
        best = head.draft_ids[logits[:, -1:].argmax(-1)]
        ids, hidden = torch.cat((ids, best), dim=1), torch.cat((hidden, out[:, -1:]), dim=1)
    return ids[0, len(tokens) :].tolist()
