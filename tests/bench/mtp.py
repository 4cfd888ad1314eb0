"""How many drafts of a trained MTP head are accepted, and what that gains.

The model is the demo model as a GLM-4.5 without experts, which computes the same. Its head is trained here, for some
minutes, on what the model writes after passages of this project's documentation: each draft is unrolled from the one
before, as in https://arxiv.org/abs/2412.19437. Then services with and without the head continue other passages,
greedily and at temperature 1. Both must give the same tokens.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from penstock.clients.events import Completion
from penstock.clients.requests import Options
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.models.train_demo.export import read_model
from penstock.models.train_demo.network import Decoder, RMSNorm, TransformerLayer, rotary_tables
from penstock.service.llm import LLM

DOCS = Path(__file__).parents[2] / "docs"
PASSAGE_CHARS, NEW_TOKENS, LENGTH, BATCH = 200, 160, 128, 16
NUM_UNROLLED = 3
DECAY = 0.8
"""A draft's weight in the loss by that of the draft before: it counts only if that one is right."""
RATE, WARM_UP_STEPS = 2e-3, 50


class Head(nn.Module):
    """An MTP head: a layer over a linear of the next token's embedding and of hidden states, each after its norm."""

    def __init__(self, target: Decoder) -> None:
        super().__init__()
        shape = target.shape
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

    def forward(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns (batch, length, hidden), before the last norm."""
        joined = torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=-1)
        out: Tensor = self.layer(self.eh_proj(joined), cos, sin)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names that published checkpoints give them after the number of the layer."""
        names = {"layer.": "", "norm.": "shared_head.norm."}
        return {
            re.sub(r"^(layer\.|norm\.)", lambda match: names[match[0]], name): tensor.detach().to(torch.bfloat16)
            for name, tensor in self.state_dict().items()
        }


def main() -> int:
    """Prints the table; returns 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training (default: 4)")
    parser.add_argument("--passages", type=int, default=1200, help="to train on (default: 1200)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 5], metavar="K", help="of a step")
    parser.add_argument("--model", type=Path, metavar="DIR", help="keep the model here, and reuse it if it is there")
    arguments = parser.parse_args()
    passages = read_passages()
    with TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "model"
        if not (model / "config.json").exists():
            write_model(model, train(passages[: arguments.passages], arguments.minutes))
        return compare(model, passages[-48:], arguments.drafts)


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


def train(passages: Sequence[str], minutes: float) -> Head:
    """Trains a head on the model's own output."""
    rows = write_texts(passages)
    target = read_model(resolve_model(DEMO)).requires_grad_(False)
    head = Head(target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.0)
    tables = rotary_tables(target.shape, LENGTH)
    chance = torch.Generator().manual_seed(0)
    began, step = time.monotonic(), 0
    with tqdm(total=round(60 * minutes), unit="s", desc="training") as progress:
        while (passed := time.monotonic() - began) < 60 * minutes:
            progress.update(round(passed) - progress.n)
            part = rows[torch.randint(len(rows), (BATCH,), generator=chance)]
            left = 1.0 - passed / (60 * minutes)
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP_STEPS, left / 0.3)
            loss = unrolled_loss(head, target, part, *tables)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            progress.set_postfix(steps=step, loss=f"{loss.item():.3f}")
    print(f"trained on {rows.numel():,} tokens for {step:,} steps of {BATCH * LENGTH:,}")
    return head


def unrolled_loss(head: Head, target: Decoder, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The cross entropy of drafts 1 to NUM_UNROLLED to the model's own distribution."""
    count = tokens.shape[1] - NUM_UNROLLED
    with torch.no_grad():
        states = target.model(tokens, cos[: tokens.shape[1]], sin[: tokens.shape[1]])
        wanted = functional.linear(states, target.model.embed_tokens.weight).softmax(-1)
        embeds = target.model.embed_tokens(tokens)
    hidden, total = states[:, :count], torch.zeros(())
    for draft in range(1, NUM_UNROLLED + 1):
        hidden = head(embeds[:, draft : draft + count], hidden, cos[:count], sin[:count])
        logits = functional.linear(head.norm(hidden), target.model.embed_tokens.weight)
        part = wanted[:, draft : draft + count].flatten(0, 1)
        total = total + DECAY ** (draft - 1) * functional.cross_entropy(logits.flatten(0, 1), part)
    return total / sum(DECAY**draft for draft in range(NUM_UNROLLED))


def write_model(folder: Path, head: Head) -> None:
    """Writes the demo model as a GLM-4.5 with this head."""
    demo = resolve_model(DEMO)
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((demo / "config.json").read_text())
    layers = config["num_hidden_layers"]
    without_experts = {
        "first_k_dense_replace": layers, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 16,
    }  # fmt: skip
    config |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": True}
    config |= {"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1, **without_experts}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {f"model.layers.{layers}.{name}": tensor for name, tensor in head.tensors().items()}
    save_file({**load_file(demo / "model.safetensors"), **tensors}, folder / "model.safetensors", {"format": "pt"})


def compare(model: Path, passages: Sequence[str], counts: Sequence[int]) -> int:
    """Prints how many drafts of each number were accepted; returns 1 if outputs differ."""
    plain = run(model, passages, "none")
    print("| drafts | choice | accepted of a step's drafts | tokens a second, one request at a time | without |")
    print("|---:|---|---:|---:|---:|")
    differing = 0
    for count in counts:
        config = json.dumps({"method": "mtp", "num_speculative_tokens": count})
        for name, (seconds, completions) in run(model, passages, config).items():
            told = [one.speculation for one in completions if one.speculation is not None]
            accepted = sum(one.accepted_tokens for one in told) / max(1, sum(one.steps for one in told))
            tokens = sum(len(one.token_ids) for one in completions)
            before_s, before = plain[name]
            differing += [one.token_ids for one in completions] != [one.token_ids for one in before]
            print(f"| {count} | {name} | {accepted:.2f} | {tokens / seconds:,.0f} | {tokens / before_s:,.0f} |")
    if differing:
        print(f"outputs differ in {differing} runs", file=sys.stderr)
    return min(1, differing)


def run(model: Path, passages: Sequence[str], speculation: str) -> dict[str, tuple[float, list[Completion]]]:
    """Continues the passages, one at a time; returns the seconds and the outputs by kind of choice."""
    found = {}
    with LLM(str(model), speculative_config=speculation) as llm:
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            llm.generate(passages[:1], max_tokens=16)
            began = time.perf_counter()
            options: Options = {"max_tokens": 128, "temperature": temperature, "seed": 7, "ignore_eos": True}
            completions = [llm.generate(passage, **options)[0] for passage in passages]
            found[name] = (time.perf_counter() - began, completions)
    return found


if __name__ == "__main__":
    sys.exit(main())
