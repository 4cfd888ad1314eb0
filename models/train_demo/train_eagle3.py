"""Trains an EAGLE-3 head for the demo model. The head drafts from the demo model's hidden states (eagle3.py).

The demo model is frozen. At every position four drafts are unrolled, each from the previous one's output, and learn the
demo model's distribution, half of the time on text of the corpus and half on the demo model's own output
(continuations.py). The ids that can be drafted are the most frequent ones in that output. At first the head passes the
highest features on unchanged, and its lm_head has rows of the demo model's. trainer.py describes the training and when
checkpoints are written. The finished head is written to --out.

Examples:
    nice -n 19 python train_eagle3.py
    python train_eagle3.py --minutes 2 --device cuda --dtype bfloat16 --micro-tokens 8192 --out /data/eagle3
    python train_eagle3.py --export-only
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.train_demo.drafters import drafter_parser, heldout_ids, read_frozen
from penstock.models.train_demo.eagle3 import Head, HeadShape, target_states, unrolled
from penstock.models.train_demo.export import write_head_config, write_weights
from penstock.models.train_demo.gradients import Loss
from penstock.models.train_demo.network import Decoder, rotary_tables
from penstock.models.train_demo.trainer import Ids, Trainer, read_tokens, train, use_cores

STAGES = ((0.0, 256), (0.8, 512))
NUM_DRAFTS = 4
DECAY = 0.8  # a draft's weight in the loss relative to the previous one's: it counts only if earlier ones are right


def frequent_ids(tokens: Ids, shape: HeadShape) -> Tensor:
    """Returns the most frequent ids, ascending."""
    counts = np.bincount(tokens, minlength=shape.vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[: shape.draft_vocab_size])
    print(f"{len(chosen):,} ids can be drafted: {counts[chosen].sum() / counts.sum():.1%} of the model's output")
    return torch.from_numpy(chosen)


def new_head(target: Decoder, shape: HeadShape, draft_ids: Tensor) -> Head:
    """Returns an untrained head that passes the target's highest features on and uses the target's rows as lm_head."""
    head = Head(shape, draft_ids)
    head.fc.weight.data[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    head.norm.weight.data.copy_(target.model.norm.weight)
    head.lm_head.weight.data.copy_(target.model.embed_tokens.weight[draft_ids.to(target.model.norm.weight.device)])
    return head


def unrolled_loss(target: Decoder) -> Loss[Head]:
    """Returns the loss -sum_i p_i log q_i of each draft, where p are the target's probabilities of the ids that can be
    drafted and q the head's, as a mean over positions and over drafts, which are weighted by powers of `DECAY`."""

    def loss(head: Head, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens = tokens[:, :-1]
        with torch.no_grad():
            features, logits = target_states(target, tokens, cos, sin, head.shape.aux_layers)
            wanted = logits.float().softmax(-1)[..., head.draft_ids]
            embeds = target.model.embed_tokens(tokens)
        total = torch.zeros((), device=tokens.device)
        for s, logits in enumerate(unrolled(head, features, embeds, cos, sin, NUM_DRAFTS)):
            part = wanted[:, s + 1 : s + 1 + logits.shape[1]]
            total = total + DECAY**s * functional.cross_entropy(logits.flatten(0, 1).float(), part.flatten(0, 1))
        return total / sum(DECAY**s for s in range(NUM_DRAFTS))

    return loss


def agreement(target: Decoder, ids: Tensor) -> Callable[[Head], Mapping[str, float]]:
    """Returns a function that measures at which share of the positions of `ids`, (rows, length), the head's likeliest
    token is also the target's, for the first draft and the last one trained."""
    cos, sin = (table.to(ids.device) for table in rotary_tables(target.shape, ids.shape[1]))

    @torch.inference_mode()
    def measure(head: Head) -> Mapping[str, float]:
        right: list[list[Tensor]] = [[] for _ in range(NUM_DRAFTS)]
        for part in torch.split(ids, 4):
            features, logits = target_states(target, part, cos, sin, head.shape.aux_layers)
            best = logits.argmax(-1)
            for s, guess in enumerate(unrolled(head, features, target.model.embed_tokens(part), cos, sin, NUM_DRAFTS)):
                right[s].append(head.draft_ids[guess.argmax(-1)] == best[:, s + 1 : s + 1 + guess.shape[1]])
        shares = [float(torch.cat(parts).float().mean()) for parts in right]
        return {"agreement": shares[0], f"agreement_{NUM_DRAFTS}": shares[-1]}

    return measure


def main() -> None:
    """Trains within the budget and writes the head."""
    args = drafter_parser(__doc__, run="eagle3").parse_args()
    use_cores()
    target, tokenizer = read_frozen(args)
    written = read_tokens(args.work / "continuations.bin")
    shape = HeadShape()
    draft_ids = frequent_ids(written, shape)
    trainer = Trainer(lambda: new_head(target, shape, draft_ids), unrolled_loss(target), STAGES, args)
    if not args.export_only:
        train(trainer, [read_tokens(args.work / "train.bin"), written], agreement(target, heldout_ids(args, tokenizer)))
    args.out.mkdir(parents=True, exist_ok=True)
    write_head_config(shape, tokenizer, args.out)
    size = write_weights(trainer.model.state_dict(), args.out)
    print(f"step {trainer.progress.step}, {trainer.progress.tokens:,} tokens, model.safetensors {size:,} bytes")


if __name__ == "__main__":
    main()
