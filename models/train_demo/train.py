"""Trains the demo model within a budget of minutes; stops and resumes at any time.

The learning rate is warmed up, stays, and falls to zero over the last quarter of the budget: progress is measured in time
spent training, so the end is planned whatever the machine does beside it. Sequences start at 256 tokens and grow to 2,048.
Matrices are updated by Muon, embeddings and norms by AdamW. A checkpoint below --work is written every few minutes and when
stopped by Ctrl-C; the same command goes on from it. The finished model is written to --out.

Examples:
    nice -n 19 python train.py --minutes 100
    python train.py --minutes 5 --device cuda --out /tmp/demo
    python train.py --minutes 100 --export-only
"""

import argparse
import ctypes
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from penstock.models.train_demo.evaluate import measure, windows
from penstock.models.train_demo.export import write_config, write_weights
from penstock.models.train_demo.network import Decoder, Shape, rotary_tables
from penstock.models.train_demo.prepare import DEFAULT_WORK
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER

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


def keep_freed_memory() -> None:
    """Stops glibc from giving large tensors' memory back to the kernel: page faults took a fifth of a step's time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 2**28)  # M_TOP_PAD


def rate_factor(progress: float, step: int) -> float:
    """The learning rate relative to its peak: linear up in `WARMUP_STEPS`, flat, linear down from `DECAY_FROM` to 1."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1.0 - progress) / (1.0 - DECAY_FROM))


def sequence_length(progress: float) -> int:
    """The length of the stage that `progress`, from 0 to 1, lies in."""
    return max(length for start, length in STAGES if progress >= start)


def draw_blocks(tokens: np.ndarray[tuple[int], np.dtype[np.uint16]], length: int, first: int, rows: int) -> Tensor:
    """`rows` blocks of `length + 1` ids, drawn without replacement; an epoch's order depends on its number and `length`."""
    per_epoch = (len(tokens) - 1) // length
    picked = []
    for number in range(first, first + rows):
        epoch, index = divmod(number, per_epoch)
        start = int(shuffled(per_epoch, epoch * 10_000 + length)[index]) * length
        picked.append(tokens[start : start + length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(picked))


_orders: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}


def shuffled(count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A permutation of `range(count)`, computed once."""
    if (count, seed) not in _orders:
        _orders[count, seed] = np.random.default_rng(seed).permutation(count)
    return _orders[count, seed]


class Trainer:
    """The model, its two optimisers and where the run stands."""

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.args = args
        self.model = Decoder(shape).to(args.device)
        inner = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        outer = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(inner, lr=args.matrix_rate, momentum=0.95, weight_decay=0.05),
            torch.optim.AdamW(outer, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self.peaks = (args.matrix_rate, args.rate)
        self.progress = Progress()
        self.path: Path = args.work / f"{args.run}.pt"
        if self.path.exists():
            self.load()

    def load(self) -> None:
        """Goes on from the checkpoint."""
        saved = torch.load(self.path, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.progress = Progress(**saved["progress"])

    def save(self) -> None:
        """Writes the checkpoint, then moves it to its name."""
        saved = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        torch.save(saved, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def step(self, batch: Tensor, factor: float) -> float:
        """One update on `batch`, ids of shape (rows, length + 1), in micro-batches; returns the mean loss in nats."""
        length = batch.shape[1] - 1
        cos, sin = (table.to(self.args.device) for table in rotary_tables(self.model.shape, length))
        parts = batch.to(self.args.device).split(max(1, self.args.micro_tokens // length))
        total = 0.0
        for part in parts:
            with torch.autocast(self.args.device, torch.bfloat16):
                loss = self.model.loss(part, cos, sin) * (len(part) / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        return total

    def run(self, tokens: np.ndarray[tuple[int], np.dtype[np.uint16]]) -> Iterator[float]:
        """Trains until the budget is spent, yielding each step's loss."""
        budget = self.args.minutes * 60
        now = self.progress
        while now.seconds < budget:
            began = time.monotonic()
            done = now.seconds / budget
            length = sequence_length(done)
            if length != now.length:
                now.length, now.block = length, 0
            batch_tokens = self.args.batch_tokens // (2 if done < self.args.small_until else 1)
            rows = max(1, batch_tokens // length)
            loss = self.step(draw_blocks(tokens, length, now.block, rows), rate_factor(done, now.step))
            now.block += rows
            now.step += 1
            now.tokens += rows * length
            now.seconds += time.monotonic() - began
            yield loss


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
    with (args.work / f"{args.run}.log").open("a") as log, tqdm(total=args.minutes, unit="min") as bar:
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
    trainer.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    parser.add_argument("--run", default="checkpoint", help="name of the checkpoint and log (default: checkpoint)")
    parser.add_argument("--minutes", type=float, default=100.0, help="training time in all, over all resumes (default: 100)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="tokens in an update (default: 16384)")
    parser.add_argument("--small-until", type=float, default=0.3, help="progress up to which updates are half as large")
    parser.add_argument("--micro-tokens", type=int, default=2048, help="tokens computed at once (default: 2048)")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak learning rate of Muon (default: 0.02)")
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate of AdamW (default: 0.003)")
    parser.add_argument("--save-every", type=float, default=3.0, help="minutes between checkpoints (default: 3)")
    parser.add_argument("--export-only", action="store_true", help="write the checkpoint's weights and stop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    trainer = Trainer(Shape(), args)
    if not args.export_only:
        train(trainer)
    write_config(trainer.model.shape, args.out)
    size = write_weights(trainer.model, args.out)
    print(f"step {trainer.progress.step}, {trainer.progress.tokens:,} tokens, model.safetensors {size:,} bytes")


if __name__ == "__main__":
    main()
