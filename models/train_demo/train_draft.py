"""Trains the demo model's draft model: a smaller model that predicts the demo model's output.

It has the demo model's tokenizer and architecture, two layers, and half the hidden size. It learns the demo model's
distribution at every position, half of the time on text of the corpus and half on the demo model's own output
(continuations.py). Its embeddings start as the principal components of the demo model's. trainer.py describes the
training and when checkpoints are written. The finished model is written to --out without a tokenizer, because it uses
the demo model's.

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
    """Returns an untrained draft model whose embeddings are the teacher's principal components."""
    sibling = Decoder(SHAPE)
    table = teacher.model.embed_tokens.weight.detach().cpu()
    directions = torch.linalg.svd(table, full_matrices=False).Vh[: SHAPE.hidden_size]
    turned = table @ directions.T
    sibling.model.embed_tokens.weight.data.copy_(turned * (0.02 / turned.std()))
    return sibling


def distillation(teacher: Decoder) -> Loss[Decoder]:
    """Returns the loss -sum_i p_i log q_i, where p and q are the probabilities of the teacher and of the draft model,
    as a mean over positions."""

    def loss(sibling: Decoder, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(tokens[:, :-1], cos, sin).float().softmax(-1)
        logits = sibling(tokens[:, :-1], cos, sin)
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(0, 1))

    return loss


def agreement(teacher: Decoder, ids: Tensor) -> Callable[[Decoder], Mapping[str, float]]:
    """Returns a function that measures at which share of the positions of `ids`, (rows, length), the draft model's
    likeliest token is also the teacher's."""
    cos, sin = (table.to(ids.device) for table in rotary_tables(teacher.shape, ids.shape[1]))

    @torch.inference_mode()
    def measure(sibling: Decoder) -> Mapping[str, float]:
        pairs = [
            (teacher(part, cos, sin).argmax(-1), sibling(part, cos, sin).argmax(-1)) for part in torch.split(ids, 4)
        ]
        return {"agreement": float(torch.cat([a == b for a, b in pairs]).float().mean())}

    return measure


def main() -> None:
    """Trains within the budget and writes the draft model."""
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
