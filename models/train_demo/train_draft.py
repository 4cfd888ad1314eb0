"""Trains the demo model's draft model: a smaller model that drafts what the demo model is likely to write.

It has the demo model's tokenizer and architecture, two layers and half the hidden size. What it learns is the demo
model's distribution at every position, half the time on text of the corpus, half the time on what the demo model wrote
itself (continuations.py). Its embeddings begin as the demo model's, turned to where most of their variance is.
trainer.py describes how it is trained, and when a checkpoint is written. The finished model is written to --out,
without the tokenizer, which is the demo model's.

Examples:
    nice -n 19 python train_draft.py
    python train_draft.py --minutes 2 --device cuda --dtype bfloat16 --micro-tokens 8192 --out /data/draft
    python train_draft.py --export-only
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.train_demo.drafters import drafter_parser, heldout_ids, read_frozen
from penstock.models.train_demo.export import write_config, write_weights
from penstock.models.train_demo.gradients import Loss
from penstock.models.train_demo.network import Decoder, DecoderShape, rotary_tables
from penstock.models.train_demo.trainer import Trainer, read_tokens, train, use_cores

STAGES = ((0.0, 256), (0.6, 512), (0.9, 1024))
SHAPE = DecoderShape(hidden_size=128, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=1)


def new_sibling(teacher: Decoder) -> Decoder:
    """An untrained sibling whose embeddings are the teacher's principal components."""
    sibling = Decoder(SHAPE)
    table = teacher.model.embed_tokens.weight.detach().cpu()
    directions = torch.linalg.svd(table, full_matrices=False).Vh[: SHAPE.hidden_size]
    turned = table @ directions.T
    sibling.model.embed_tokens.weight.data.copy_(turned * (0.02 / turned.std()))
    return sibling


def distillation(teacher: Decoder) -> Loss[Decoder]:
    """The loss -sum_i p_i log q_i with the teacher's probabilities p and the sibling's q, a mean over positions."""

    def loss(sibling: Decoder, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(tokens[:, :-1], cos, sin).float().softmax(-1)
        logits = sibling(tokens[:, :-1], cos, sin)
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(0, 1))

    return loss


def agreement(teacher: Decoder, ids: Tensor) -> Callable[[Decoder], Mapping[str, float]]:
    """Measures in how many of the positions of `ids`, (rows, length), a sibling's best token is the teacher's."""
    cos, sin = (table.to(ids.device) for table in rotary_tables(teacher.shape, ids.shape[1]))

    @torch.inference_mode()
    def measure(sibling: Decoder) -> Mapping[str, float]:
        pairs = [
            (teacher(part, cos, sin).argmax(-1), sibling(part, cos, sin).argmax(-1)) for part in torch.split(ids, 4)
        ]
        return {"agreement": float(torch.cat([a == b for a, b in pairs]).float().mean())}

    return measure


def main() -> None:
    """Trains within the budget and writes the sibling."""
    args = drafter_parser(__doc__, run="draft").parse_args()
    use_cores()
    teacher, tokenizer = read_frozen(args)
    trainer = Trainer(lambda: new_sibling(teacher), distillation(teacher), STAGES, args)
    if not args.export_only:
        sources = [read_tokens(args.work / name) for name in ("train.bin", "continuations.bin")]
        train(trainer, sources, agreement(teacher, heldout_ids(args, tokenizer)))
    args.out.mkdir(parents=True, exist_ok=True)
    write_config(trainer.model.shape, tokenizer, args.out)
    size = write_weights(trainer.model.state_dict(), args.out)
    print(f"step {trainer.progress.step}, {trainer.progress.tokens:,} tokens, model.safetensors {size:,} bytes")


if __name__ == "__main__":
    main()
