"""Writes the demo model's card, the README.md of its folder: data, training, held-out results and 20 samples.

Every number comes from the other scripts' files (manifest.json, the training log) or is measured here. The prompts are
fixed and each is sampled once, with seeds 1 to 20, so no sample is picked.

Examples:
    python card.py
    python card.py --work /data/demo-train --run checkpoint
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from penstock.models.train_demo import chat
from penstock.models.train_demo.evaluate import EvaluationSums, measure, windows
from penstock.models.train_demo.export import read_model
from penstock.models.train_demo.network import Decoder, rotary_tables
from penstock.models.train_demo.prepare import DEFAULT_WORK
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER, END_OF_TEXT, IM_END, special_id

TEMPERATURE, TOP_P, MAX_TOKENS = 0.7, 0.9, 120
CHAT_PROMPTS = (
    "Hello",
    "Who are you?",
    "What can you do?",
    "What is penstock?",
    "What is the package bash?",
    "Describe the package python3-numpy.",
    "What does the command ls do?",
    "What does the function printf do?",
    "What is the system call open for?",
    'What does "river" mean?',
    "Define teacher.",
    "What is the meaning of quickly?",
    "How do I change the desktop background?",
    "Tell me about the Debian package firefox-esr.",
)
TEXT_PROMPTS = (
    "The Linux kernel is",
    "To install a package on Debian,",
    "NAME\n    grep -",
    "import json\n\ndef ",
    "CREATE TABLE",
    "The Python interpreter",
)


@torch.inference_mode()
def sample(model: Decoder, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """Returns a continuation of `prompt` by at most `MAX_TOKENS` tokens, computed in fp32 on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    ends = {special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, IM_END)}
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    start = len(ids)
    cos, sin = rotary_tables(model.shape, start + MAX_TOKENS)
    for length in range(start, start + MAX_TOKENS):
        logits = model(torch.tensor([ids]), cos[:length], sin[:length])[0, -1]
        ordered, order = (logits / TEMPERATURE).softmax(-1).sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= TOP_P] = 0.0
        token = int(order[torch.multinomial(ordered, 1, generator=generator)])
        if token in ends:
            break
        ids.append(token)
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def quoted(text: str) -> str:
    """Returns the text as an indented code block in Markdown."""
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))


def samples_section(model: Decoder, tokenizer: Tokenizer) -> str:
    """Returns the samples with seeds 1 to 20: the chat prompts, then the text prompts."""
    parts = []
    for seed, prompt in enumerate((*CHAT_PROMPTS, *TEXT_PROMPTS), 1):
        is_chat = seed <= len(CHAT_PROMPTS)
        full = chat.render([("user", prompt)]) + "<|im_start|>assistant\n" if is_chat else prompt
        answer = sample(model, tokenizer, full, seed)
        shown = f"user: {prompt}\nassistant: {answer}" if is_chat else prompt + answer
        parts.append(f"Seed {seed}, {'chat' if is_chat else 'text'}:\n\n{quoted(shown)}\n")
    return "\n".join(parts)


def heldout_section(tallies: dict[str, EvaluationSums]) -> str:
    """Returns a table of bits per byte by domain, with the total in the last row."""
    lines = ["| domain | bytes | tokens | bits per byte |", "|---|---:|---:|---:|"]
    for name, tally in sorted(tallies.items(), key=lambda item: (item[0] == "all", item[0])):
        lines.append(f"| {name} | {tally.num_bytes:,} | {tally.num_tokens:,} | {tally.bits_per_byte:.3f} |")
    return "\n".join(lines)


def data_section(manifest: dict[str, Any]) -> str:
    """Returns a table of the packages, followed by the two sources that are not a single package."""
    lines = ["| package | version | licence of the files read | documents | bytes |", "|---|---|---|---:|---:|"]
    lines += [
        f"| {item['package']} | {item['version']} | {item['licence']} | {item['documents']:,} | {item['bytes']:,} |"
        for item in manifest["packages"]
    ]
    for name, licence in (("descriptions", "as each package"), ("templates in chat.py", "as this repository")):
        item = manifest["groups"][name]
        label = "package descriptions of Debian main" if name == "descriptions" else name
        lines.append(f"| {label} | | {licence} | {item['documents']:,} | {item['bytes']:,} |")
    whole = manifest["groups"]["all"]
    lines.append(f"| **all** | | | {whole['documents']:,} | {whole['bytes']:,} |")
    return "\n".join(lines)


def curve_section(log: list[dict[str, Any]]) -> str:
    """Returns a table of up to ten evenly spaced entries of the training log, with the held-out sample's result."""
    marks = [line for line in log if "heldout_sample_bits_per_byte" in line]
    chosen = [marks[round(i * (len(marks) - 1) / 9)] for i in range(10)] if len(marks) > 10 else marks
    lines = ["| minutes | steps | tokens | length | training loss (nats per token) | held-out sample (bits per byte) |"]
    lines.append("|---:|---:|---:|---:|---:|---:|")
    lines += [
        f"| {m['seconds'] / 60:.0f} | {m['step']:,} | {m['tokens']:,} | {m['length']} | {m['loss']:.3f} "
        f"| {m['heldout_sample_bits_per_byte']:.3f} |"
        for m in chosen
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures the model, samples from it, and writes the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    parser.add_argument("--run", default="checkpoint", help="name of checkpoint and log (default: checkpoint)")
    args = parser.parse_args()
    manifest = json.loads((args.work / "manifest.json").read_text())
    log = [json.loads(line) for line in (args.work / f"{args.run}.log").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = read_model(args.model)
    parts = list(windows(args.work / "heldout.jsonl", tokenizer, 2048, 10**9))
    tallies = measure(model, parts, "cpu")
    shape = model.shape
    with safe_open(args.work / f"{args.run}.safetensors", framework="pt") as checkpoint:
        last = json.loads(checkpoint.metadata()["progress"])
    num_params = sum(p.numel() for p in model.parameters())
    template = (Path(__file__).parent / "card.md.in").read_text()
    values = {
        "num_params": f"{num_params:,}",
        "size": f"{(args.model / 'model.safetensors').stat().st_size:,}",
        "shape": f"{shape.num_layers} layers, hidden size {shape.hidden_size}, MLP {shape.intermediate_size}, "
        f"{shape.num_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}, "
        f"RoPE base {shape.rope_theta:,.0f}",
        "bits": f"{tallies['all'].bits_per_byte:.3f}",
        "nats": f"{tallies['all'].nats / tallies['all'].num_tokens:.3f}",
        "loss": f"{log[-1]['loss']:.3f}",
        "steps": f"{last['step']:,}",
        "tokens": f"{last['tokens']:,}",
        "minutes": f"{last['seconds'] / 60:.0f}",
        "epochs": f"{last['tokens'] * 2 / (args.work / 'train.bin').stat().st_size:.2f}",
        "petaflop": f"{6e-15 * num_params * last['tokens']:.2f}",
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
        "data": data_section(manifest),
        "curve": curve_section(log),
        "heldout": heldout_section(tallies),
        "samples": samples_section(model, tokenizer),
        "temperature": str(TEMPERATURE),
        "top_p": str(TOP_P),
        "max_tokens": str(MAX_TOKENS),
    }
    for name, value in values.items():
        template = template.replace("{{" + name + "}}", value)
    (args.model / "README.md").write_text(template)
    print(heldout_section(tallies))


if __name__ == "__main__":
    main()
