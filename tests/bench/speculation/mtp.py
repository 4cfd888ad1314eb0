"""How many drafts of a trained MTP head are accepted, and what that gains.

The head is the demo model's, and trained here, for three minutes, on what the model writes after passages of this
project's documentation: each draft is unrolled from the one before, as in https://arxiv.org/abs/2412.19437. The model
is frozen, so its hidden states are computed once. Its vocabulary would cost as much as the head's layer, so each batch
has the frequent ids and a sample of the others.

Then the demo model continues other passages, greedily and at temperature 1. The first table has the drafts of an
untrained head, the trained one and the demo model's EAGLE-3 head that are right, counted as in the card of the latter.
The second one has the speed with those drafts of the wide model of `make bench-spec`, as a GLM-4.5 without experts:
it computes the same function with 1.2 GB of weights, so that a step costs as much as that of a real model. All services
must give the same tokens.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from spec_bench.widen import Sizes, widen, widened
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from penstock.clients.events import Completion
from penstock.clients.requests import Options
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.models.train_demo.eagle3 import Past, unrolled_attention
from penstock.models.train_demo.evaluate_drafts import (
    COUNTS,
    MAX_DRAFTS,
    Drafter,
    Steps,
    WrittenText,
    head_drafter,
    unrolled_drafter,
)
from penstock.models.train_demo.export import read_head, read_model
from penstock.models.train_demo.gradients import Loss
from penstock.models.train_demo.network import Decoder, Network, RMSNorm, TransformerLayer, rotary_tables
from penstock.models.train_demo.trainer import Trainer, training_parser, use_cores
from penstock.service.llm import LLM

DOCS = Path(__file__).parents[3] / "docs"
EAGLE3 = "demo_eagle3"
NUM_HELD_OUT, NUM_TIMED = 48, 4
PASSAGE_CHARS, NEW_TOKENS, LENGTH = 200, 160, 128
BATCH_TOKENS = 2048
NUM_FREQUENT, NUM_DRAWN = 1536, 512
"""How many ids each batch has of those that the model writes most often, and how many of the others."""
NUM_UNROLLED = 3
DECAY = 0.8
"""A draft's weight in the loss by that of the draft before: it counts only if that one is right."""
CHOICES: Mapping[str, float] = {"greedy": 0.0, "temperature 1": 1.0}
SEED = 7

Outputs = Mapping[str, tuple[float, Sequence[Completion]]]
"""The seconds and the completions by kind of choice."""


class Head(Network):
    """An MTP head: a layer over a linear of the next token's embedding and of hidden states, each after its norm."""

    def __init__(self, target: Decoder) -> None:
        super().__init__()
        self.shape = shape = target.shape
        self.enorm, self.hnorm = (RMSNorm(shape.hidden_size, shape.norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = TransformerLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        # Begins as the model's last layer, on the hidden states as they are.
        self.layer.load_state_dict(target.model.layers[-1].state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.eh_proj.weight.data.copy_(
            torch.cat((torch.zeros(shape.hidden_size, shape.hidden_size), torch.eye(shape.hidden_size)), 1)
        )

    def forward(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """Returns (batch, rows, hidden), before the last norm. Appends the keys and values to ``past``."""
        x = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=-1))
        attention = self.layer.self_attn
        q, k, v = attention.heads(self.layer.input_layernorm(x), cos, sin)
        past.append((k, v))
        x = x + attention.o_proj(unrolled_attention(q, past).transpose(1, 2).flatten(2))
        out: Tensor = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return out

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names that published checkpoints give them after the number of the layer."""
        names = {"layer.": "", "norm.": "shared_head.norm."}
        return {
            re.sub(r"^(layer\.|norm\.)", lambda match: names[match[0]], name): tensor.detach().to(torch.bfloat16)
            for name, tensor in self.state_dict().items()
        }


def unrolled(head: Head, hidden: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, num_drafts: int) -> Iterator[Tensor]:
    """Yields the normalised hidden states of drafts 1 to ``num_drafts`` after every prefix, (batch, n - num_drafts,
    hidden): row t of draft s + 1 predicts token t + 2 + s. ``hidden`` and ``embeds`` cover tokens 0 to n - 1."""
    rows = hidden.shape[1] - num_drafts
    out = hidden[:, :rows]
    past: Past = []
    for s in range(num_drafts):
        out = head(embeds[:, s + 1 : s + 1 + rows], out, cos[s : s + rows], sin[s : s + rows], past)
        yield head.norm(out)


def main() -> int:
    """Prints the tables; returns 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="of training (default: 3)")
    parser.add_argument("--passages", type=int, default=1200, help="to train on, at most (default: 1200)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3], metavar="K", help="of a step (default: 1 3)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="keep the model here, and reuse it if it is there")
    arguments = parser.parse_args()
    passages = read_passages()
    target = read_model(resolve_model(DEMO)).requires_grad_(requires_grad=False)
    use_cores()
    with TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "model"
        if not (model / "config.json").exists():
            some = passages[:-NUM_HELD_OUT][: arguments.passages]
            write_model(model, train(target, some, arguments.minutes, Path(folder)))
        rest = passages[-NUM_HELD_OUT:]
        print_right_drafts(target, model, rest, run(DEMO, rest, "none"))
        return print_speeds(model, rest[:NUM_TIMED], arguments.drafts)


def read_passages() -> list[str]:
    """Beginnings of paragraphs of the documentation, shuffled; the last ones are not trained on."""
    paragraphs = [part for file in sorted(DOCS.glob("*.md")) for part in file.read_text().split("\n\n")]
    found = [part[:PASSAGE_CHARS] for part in paragraphs if len(part) > 60 and not part.startswith(("|", "    "))]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[at] for at in order]


def write_texts(passages: Sequence[str]) -> Tensor:
    """Returns what the model writes after passages, cut into (rows, LENGTH)."""
    ids: list[int] = []
    with LLM(DEMO) as llm:
        for number, temperature in enumerate((0.0, 0.7, 1.0)):
            some = passages[number::3]
            for completion in llm.generate(some, progress=True, max_tokens=NEW_TOKENS, temperature=temperature, seed=1):
                ids += completion.token_ids
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


def read_states(target: Decoder, rows: Tensor) -> Tensor:
    """Returns the model's hidden states after its last norm, (tokens of all rows, hidden)."""
    tables = rotary_tables(target.shape, LENGTH)
    with torch.no_grad():
        parts = [target.model(part, *tables).flatten(0, 1) for part in tqdm(rows.split(16), desc="hidden states")]
    return torch.cat(parts)


def train(target: Decoder, passages: Sequence[str], minutes: float, work: Path) -> Head:
    """Trains a head on the model's own output."""
    rows = write_texts(passages)
    loss = unrolled_loss(target, rows.flatten(), read_states(target, rows))
    options = training_parser(None, run="mtp", minutes=minutes, dtype="float32").parse_args(["--work", str(work)])
    options.batch_tokens = BATCH_TOKENS
    trainer = Trainer(lambda: Head(target), loss, ((0.0, LENGTH),), options)
    with tqdm(total=round(60 * minutes), unit="s", desc="training") as progress:
        for nats in trainer.run([torch.arange(rows.numel() + 1).numpy()]):
            progress.update(round(trainer.progress.seconds) - progress.n)
            progress.set_postfix(steps=trainer.progress.step, loss=f"{nats:.3f}")
    print(f"trained on {rows.numel():,} tokens for {trainer.progress.step:,} steps of {BATCH_TOKENS:,}")
    return trainer.model


def unrolled_loss(target: Decoder, tokens: Tensor, states: Tensor) -> Loss[Head]:
    """Returns the cross entropy of drafts 1 to NUM_UNROLLED to the model's own distribution, over the ids of a batch.
    It takes places in ``tokens``, (N,), and ``states``, (N, hidden), instead of ids."""
    embedding = target.model.embed_tokens.weight
    order = torch.bincount(tokens, minlength=len(embedding)).argsort(descending=True)
    frequent, others = order[:NUM_FREQUENT], order[NUM_FREQUENT:]

    def loss(head: Head, places: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        places = places[:, :-1]
        chance = torch.Generator().manual_seed(int(places[0, 0]))
        drawn = others[torch.randperm(len(others), generator=chance)[:NUM_DRAWN]]
        output, hidden = embedding[torch.cat((frequent, drawn))], states[places]
        wanted = functional.linear(hidden, output).float().softmax(-1)
        total = torch.zeros(())
        for s, normed in enumerate(unrolled(head, hidden, embedding[tokens[places]], cos, sin, NUM_UNROLLED)):
            logits, part = functional.linear(normed, output), wanted[:, s + 1 : s + 1 + normed.shape[1]]
            total = total + DECAY**s * functional.cross_entropy(logits.flatten(0, 1).float(), part.flatten(0, 1))
        return total / sum(DECAY**s for s in range(NUM_UNROLLED))

    return loss


def write_model(folder: Path, head: Head) -> None:
    """Writes the wide model as a GLM-4.5 with this head, which is as wide."""
    widen(folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    without_experts = {
        "first_k_dense_replace": layers, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 16,
    }  # fmt: skip
    config |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": True}
    config |= {"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1, **without_experts}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    chance = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{layers}.{name}": widened(name, tensor, is_new=False, sizes=Sizes(), random=chance)
        for name, tensor in head.tensors().items()
    }
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors", {"format": "pt"})


def read_trained(target: Decoder, folder: Path) -> Head:
    """Reads the head that ``write_model`` wrote, as wide as it was."""
    head, prefix = Head(target), f"model.layers.{Sizes().num_hidden_layers}."
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        for ours, published in zip(head.state_dict().values(), head.tensors(), strict=True):
            ours.copy_(stored.get_tensor(prefix + published)[tuple(map(slice, ours.shape))])
    return head


def mtp_drafter(head: Head, target: Decoder) -> Drafter:
    """Returns a drafter for an MTP head."""

    def logits(ids: Tensor) -> Iterator[Tensor]:
        tables, embedding = rotary_tables(target.shape, ids.shape[1]), target.model.embed_tokens
        for normed in unrolled(head, target.model(ids, *tables), embedding(ids), *tables, MAX_DRAFTS):
            yield functional.linear(normed, embedding.weight)

    return unrolled_drafter(logits, torch.arange(target.shape.vocab_size))


@torch.inference_mode()
def print_right_drafts(target: Decoder, model: Path, passages: Sequence[str], outputs: Outputs) -> None:
    """Prints how many drafts are right before the first wrong one, for steps that request k drafts."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(passage, add_special_tokens=False).ids for passage in passages]
    drafters = {
        "mtp, untrained": mtp_drafter(Head(target), target),
        "mtp": mtp_drafter(read_trained(target, model), target),
        EAGLE3: head_drafter(read_head(resolve_model(EAGLE3)), target),
    }
    print("| drafter | choice | tokens |", *(f"k = {k} |" for k in COUNTS))
    print("|---|---|---:|" + "---:|" * MAX_DRAFTS)
    for name, drafter in drafters.items():
        for choice, (_, completions) in outputs.items():
            steps = Steps()
            for prompt, completion in zip(prompts, completions, strict=True):
                ids = torch.tensor(prompt + completion.token_ids)
                text = WrittenText("documents", ids, len(prompt), SEED if CHOICES[choice] else None)
                steps.add_predictions(drafter(text), text.start)
            means = (f"{steps.accepted[k] / steps.number[k]:.2f} |" for k in COUNTS)
            print(f"| {name} | {choice} | {steps.tokens:,} |", *means)


def print_speeds(model: Path, passages: Sequence[str], counts: Sequence[int]) -> int:
    """Prints the speed with each drafter and number of drafts; returns 1 if outputs differ."""
    without = run(str(model), passages, "none")
    print("\n| drafts from | at most | choice | tokens of a step with drafts | tokens/s | of the speed without |")
    print("|---|---:|---|---:|---:|---:|")
    for choice, (seconds, completions) in without.items():
        print(f"| none | | {choice} | | {num_tokens(completions) / seconds:,.1f} | |")
    differing = 0
    for method in ({"method": "mtp"}, {"method": "eagle3", "model": EAGLE3}):
        for count in counts:
            config = json.dumps({**method, "num_speculative_tokens": count})
            for choice, (seconds, completions) in run(str(model), passages, config).items():
                told = [one.speculation for one in completions if one.speculation is not None]
                length = 1 + sum(one.accepted_tokens for one in told) / max(1, sum(one.steps for one in told))
                before_s, before = without[choice]
                differing += [one.token_ids for one in completions] != [one.token_ids for one in before]
                speed = f"{num_tokens(completions) / seconds:,.1f} | {before_s / seconds:.2f}"
                print(f"| {method['method']} | {count} | {choice} | {length:.2f} | {speed} |")
    if differing:
        print(f"outputs differ in {differing} runs", file=sys.stderr)
    return min(1, differing)


def num_tokens(completions: Sequence[Completion]) -> int:
    """Returns the number of output tokens."""
    return sum(len(one.token_ids) for one in completions)


def run(model: str, passages: Sequence[str], speculation: str) -> Outputs:
    """Continues the passages, one at a time."""
    found = {}
    with LLM(model, speculative_config=speculation) as llm:
        for name, temperature in CHOICES.items():
            llm.generate(passages[:1], max_tokens=16)
            began = time.perf_counter()
            options: Options = {"max_tokens": 128, "ignore_eos": True, "seed": SEED}
            options |= {"temperature": temperature, "top_p": 1.0}
            completions = [llm.generate(passage, **options)[0] for passage in passages]
            found[name] = (time.perf_counter() - began, completions)
    return found


if __name__ == "__main__":
    sys.exit(main())
