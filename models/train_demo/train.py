"""Trains the demo model within a budget of minutes; stops and resumes at any time.

The learning rate is warmed up, stays, and falls to zero over the last quarter of the budget: progress is measured in
time spent training, so the end is planned whatever the machine does beside it. Sequences start at 256 tokens and grow
to 2,048. Matrices are updated by Muon, embeddings and norms by AdamW. A checkpoint below --work is written every few
minutes and when stopped by Ctrl-C; the same command goes on from it. The finished model is written to --out.

Cost: 35 million floating-point operations a token, attention aside. The model's card states what two CPU cores took. On
a GPU the cost was not measured; at 20 TFLOP/s, which so small a model should reach, 20 million tokens are 35 seconds.

Examples:
    nice -n 19 python train.py --minutes 100
    python train.py --minutes 5 --device cuda --micro-tokens 8192 --out /data/demo
    python train.py --minutes 100 --export-only
"""

import argparse
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from penstock.models.train_demo.evaluate import measure, windows
from penstock.models.train_demo.export import write_config, write_weights
from penstock.models.train_demo.gradients import Gradients, keep_freed_memory
from penstock.models.train_demo.network import Decoder, Shape
from penstock.models.train_demo.prepare import DEFAULT_WORK
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER

Ids = np.ndarray[tuple[int], np.dtype[np.uint16]]

STAGES = ((0.0, 256), (0.4, 512), (0.75, 1024), (0.9, 2048))  # from this progress on, sequences of this many tokens
WARMUP_STEPS = 100
DECAY_FROM = 0.75


@dataclass
class Progress:
    """What a checkpoint says of the run so far; `block` counts the blocks read at the present length."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    length: int = 0
    block: int = 0


def rate_factor(progress: float, step: int) -> float:
    """The learning rate relative to its peak: linear up in `WARMUP_STEPS`, flat, linear down from `DECAY_FROM` to 1."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1.0 - progress) / (1.0 - DECAY_FROM))


def sequence_length(progress: float) -> int:
    """The length of the stage that `progress`, from 0 to 1, lies in."""
    return max(length for start, length in STAGES if progress >= start)


class Blocks:
    """The corpus cut into blocks of `length + 1` ids, in an order that depends on the epoch's number and `length`."""

    def __init__(self, tokens: Ids, length: int) -> None:
        self.tokens = tokens
        self.length = length
        self.per_epoch = (len(tokens) - 1) // length
        self.orders: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def draw(self, first: int, rows: int) -> Tensor:
        """Blocks `first` to `first + rows`, counted through the epochs; int64 of shape (rows, length + 1)."""
        picked = []
        for number in range(first, first + rows):
            epoch, index = divmod(number, self.per_epoch)
            if epoch not in self.orders:
                self.orders[epoch] = np.random.default_rng(epoch * 10_000 + self.length).permutation(self.per_epoch)
            start = int(self.orders[epoch][index]) * self.length
            picked.append(self.tokens[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(picked))


class Trainer:
    """The model, its two optimisers and where the run stands."""

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.args = args
        self.model = Decoder(shape).to(args.device)
        inner = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        outer = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        # Two optimisers for the matrices, so that two threads can update them.
        matrices = [
            torch.optim.Muon(half, lr=args.matrix_rate, momentum=0.95, weight_decay=0.05)
            for half in (inner[::2], inner[1::2])
        ]
        others = torch.optim.AdamW(outer, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (*matrices, others)
        self.peaks = (args.matrix_rate, args.matrix_rate, args.rate)
        self.gradients = Gradients(self.model, args.device, args.threads, args.micro_tokens)
        self.progress = Progress()
        self.path: Path = args.work / f"{args.run}.safetensors"
        if self.path.exists():
            self.load()

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the run: parameters, and what the optimisers remember of each."""
        tensors = dict(self.model.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            for index, memory in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in memory.items()}
        return tensors

    def save(self) -> None:
        """Writes the checkpoint under another name, then moves it to its own."""
        new = self.path.with_suffix(".new")
        save_file(self.state(), new, metadata={"progress": json.dumps(asdict(self.progress))})
        new.replace(self.path)

    def load(self) -> None:
        """Goes on from the checkpoint."""
        with safe_open(self.path, framework="pt", device=self.args.device) as saved:
            self.progress = Progress(**json.loads(saved.metadata()["progress"]))
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
        self.model.load_state_dict(
            {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}
        )
        for number, optimizer in enumerate(self.optimizers):
            whole = optimizer.state_dict()
            for name, value in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    _, _, index, key = name.split(".")
                    whole["state"].setdefault(int(index), {})[key] = value
            optimizer.load_state_dict(whole)

    def step(self, batch: Tensor, factor: float) -> float:
        """One update on `batch`, ids of shape (rows, length + 1); returns the mean loss in nats."""
        loss = self.gradients.add(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        list(self.gradients.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.model.zero_grad()
        return loss

    def run(self, tokens: Ids) -> Iterator[float]:
        """Trains until the budget is spent, yielding each step's loss."""
        budget = self.args.minutes * 60
        now = self.progress
        blocks = Blocks(tokens, now.length or sequence_length(0.0))
        while now.seconds < budget:
            began = time.monotonic()
            done = now.seconds / budget
            length = sequence_length(done)
            if length != blocks.length:
                blocks, now.block = Blocks(tokens, length), 0
            now.length = length
            rows = max(1, self.args.batch_tokens // length)
            loss = self.step(blocks.draw(now.block, rows), rate_factor(done, now.step))
            now.block += rows
            now.step += 1
            now.tokens += rows * length
            now.seconds += time.monotonic() - began
            yield loss


def progress_bar(trainer: Trainer) -> "tqdm[NoReturn]":
    """A bar that counts minutes of the budget, those of earlier runs too."""
    return tqdm(total=trainer.args.minutes, initial=round(trainer.progress.seconds / 60, 2), unit="min")


def train(trainer: Trainer) -> None:
    """Runs to the end of the budget or to a signal, with a progress bar, a log, held-out figures and checkpoints."""
    args = trainer.args
    tokens = np.memmap(args.work / "train.bin", dtype=np.uint16, mode="r")
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    sample = list(windows(args.work / "heldout.jsonl", tokenizer, 1024, 120))
    stopped: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.append(signum)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    last_save, average = time.monotonic(), 0.0
    now = trainer.progress
    with (args.work / f"{args.run}.log").open("a") as log, progress_bar(trainer) as bar:
        for loss in trainer.run(tokens):
            average = loss if average == 0.0 else 0.95 * average + 0.05 * loss
            bar.n = round(now.seconds / 60, 2)
            bar.set_postfix(step=now.step, loss=f"{average:.3f}", tokens=f"{now.tokens / 1e6:.1f}M", refresh=False)
            bar.update(0)
            if now.step % 20 == 0:
                log.write(json.dumps(asdict(now) | {"loss": average}) + "\n")
            if stopped or time.monotonic() - last_save > args.save_every * 60:
                bits = measure(trainer.model, sample, args.device, quiet=True)["all"].bits_per_byte
                log.write(json.dumps(asdict(now) | {"loss": average, "heldout_sample_bits_per_byte": bits}) + "\n")
                log.flush()
                trainer.save()
                last_save = time.monotonic()
            if stopped:
                raise SystemExit(f"stopped at step {now.step}; the same command goes on")
        bits = measure(trainer.model, sample, args.device, quiet=True)["all"].bits_per_byte
        log.write(json.dumps(asdict(now) | {"loss": average, "heldout_sample_bits_per_byte": bits}) + "\n")
    trainer.save()


def main() -> None:
    """Trains within the budget and writes the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    parser.add_argument("--run", default="checkpoint", help="name of the checkpoint and log (default: checkpoint)")
    parser.add_argument(
        "--minutes", type=float, default=100.0, help="training time in all, over all resumes (default: 100)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use (default: 2)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens in an update (default: 8192)")
    parser.add_argument("--micro-tokens", type=int, default=1024, help="tokens computed at once (default: 1024)")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak learning rate of Muon (default: 0.02)")
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate of AdamW (default: 0.003)")
    parser.add_argument("--save-every", type=float, default=3.0, help="minutes between checkpoints (default: 3)")
    parser.add_argument("--export-only", action="store_true", help="write the checkpoint's weights and stop")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a core computes a micro-batch; kernels are not split
    keep_freed_memory()
    trainer = Trainer(Shape(), args)
    if not args.export_only:
        train(trainer)
    write_config(trainer.model.shape, args.out)
    size = write_weights(trainer.model, args.out)
    print(f"step {trainer.progress.step}, {trainer.progress.tokens:,} tokens, model.safetensors {size:,} bytes")


if __name__ == "__main__":
    main()
