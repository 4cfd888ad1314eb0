"""Trains a network within a budget of minutes; stops and resumes at any time.

The learning rate is warmed up, stays constant, and falls to zero over the last quarter of the budget. Progress is
measured in time spent training, so a run ends as planned even on a busy machine. Muon updates the matrices, AdamW the
rest. A checkpoint is written every few minutes and on Ctrl-C, and the same command resumes from it. The callers provide
the network and its loss.
"""

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Generic, NoReturn

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from penstock.models.train_demo.gradients import Gradients, Loss, Trained, keep_freed_memory
from penstock.models.train_demo.prepare import DEFAULT_WORK

Ids = np.ndarray[tuple[int], np.dtype[np.uint16]]

Stages = Sequence[tuple[float, int]]  # (progress from which the stage applies, sequence length in tokens)
WARMUP_STEPS = 100
DECAY_FROM = 0.75


@dataclass
class TrainingProgress:
    """The state of a run in a checkpoint. `block` is the number of blocks read at the current length."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    length: int = 0
    block: int = 0


def rate_factor(progress: float, step: int) -> float:
    """Returns the learning rate relative to its peak: it rises linearly in `WARMUP_STEPS`, stays constant, and falls
    linearly from progress `DECAY_FROM` to 1."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1.0 - progress) / (1.0 - DECAY_FROM))


def sequence_length(stages: Stages, progress: float) -> int:
    """Returns the sequence length of the stage at `progress`, from 0 to 1."""
    return max(length for start, length in stages if progress >= start)


class Blocks:
    """A corpus split into blocks of `length + 1` ids, in an order that depends on the epoch's number and `length`."""

    def __init__(self, tokens: Ids, length: int) -> None:
        self.tokens = tokens
        self.length = length
        self.per_epoch = (len(tokens) - 1) // length
        self.orders: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def draw(self, first: int, rows: int) -> Tensor:
        """Returns `rows` blocks from number `first` on, counted across epochs: int64 of shape (rows, length + 1)."""
        picked = []
        for number in range(first, first + rows):
            epoch, index = divmod(number, self.per_epoch)
            if epoch not in self.orders:
                self.orders[epoch] = np.random.default_rng(epoch * 10_000 + self.length).permutation(self.per_epoch)
            start = int(self.orders[epoch][index]) * self.length
            picked.append(self.tokens[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(picked))


def is_inner(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix between hidden states, not an embedding or output matrix."""
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


class Trainer(Generic[Trained]):
    """The model, its optimisers, and the progress of the run. `make` creates the untrained model."""

    def __init__(
        self, make: Callable[[], Trained], loss: Loss[Trained], stages: Stages, args: argparse.Namespace
    ) -> None:
        torch.manual_seed(1)
        self.args = args
        self.stages = stages
        self.model = make().to(args.device)
        inner = [p for name, p in self.model.named_parameters() if is_inner(name, p)]
        outer = [p for name, p in self.model.named_parameters() if not is_inner(name, p)]
        # Two optimisers for the matrices, so that two threads can update them.
        matrices = [
            torch.optim.Muon(half, lr=args.matrix_rate, momentum=0.95, weight_decay=0.05)
            for half in (inner[::2], inner[1::2])
        ]
        others = torch.optim.AdamW(outer, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (*matrices, others)
        self.peaks = (args.matrix_rate, args.matrix_rate, args.rate)
        self.gradients = Gradients(self.model, make, loss, args)
        self.progress = TrainingProgress()
        self.path: Path = args.work / f"{args.run}.safetensors"
        if self.path.exists():
            self.load()

    def state(self) -> dict[str, Tensor]:
        """Returns all tensors of the run: parameters and the optimisers' states."""
        tensors = dict(self.model.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            for index, memory in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in memory.items()}
        return tensors

    def save(self) -> None:
        """Writes the checkpoint to a temporary file, then renames it."""
        new = self.path.with_suffix(".new")
        save_file(self.state(), new, metadata={"progress": json.dumps(asdict(self.progress))})
        new.replace(self.path)

    def load(self) -> None:
        """Resumes from the checkpoint."""
        with safe_open(self.path, framework="pt", device=self.args.device) as saved:
            self.progress = TrainingProgress(**json.loads(saved.metadata()["progress"]))
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
        """Updates the model once on `batch`, ids of shape (rows, length + 1). Returns the mean loss in nats."""
        loss = self.gradients.add_batch(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        list(self.gradients.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.model.zero_grad()
        return loss

    def run(self, sources: Sequence[Ids]) -> Iterator[float]:
        """Trains until the budget is spent, on equal parts of each source. Yields each step's loss."""
        budget = self.args.minutes * 60
        now = self.progress
        length = now.length or sequence_length(self.stages, 0.0)
        blocks = [Blocks(tokens, length) for tokens in sources]
        while now.seconds < budget:
            began = time.monotonic()
            done = now.seconds / budget
            length = sequence_length(self.stages, done)
            if length != blocks[0].length:
                blocks, now.block = [Blocks(tokens, length) for tokens in sources], 0
            now.length = length
            rows = max(1, self.args.batch_tokens // length // len(sources))
            batch = torch.cat([part.draw(now.block, rows) for part in blocks])
            loss = self.step(batch, rate_factor(done, now.step))
            now.block += rows
            now.step += 1
            now.tokens += len(batch) * length
            now.seconds += time.monotonic() - began
            yield loss


def progress_bar(progress: TrainingProgress, minutes: float) -> "tqdm[NoReturn]":
    """Returns a progress bar that counts minutes of the budget, earlier runs included."""
    return tqdm(total=minutes, initial=round(progress.seconds / 60, 2), unit="min")


def train(
    trainer: Trainer[Trained], sources: Sequence[Ids], measure_heldout: Callable[[Trained], Mapping[str, float]]
) -> None:
    """Trains until the budget is spent or a signal arrives. Shows the progress; writes checkpoints, and a log with
    the held-out results."""
    args = trainer.args
    stopped: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.append(signum)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    last_save, average = time.monotonic(), 0.0
    now = trainer.progress
    with (args.work / f"{args.run}.log").open("a") as log, progress_bar(now, args.minutes) as bar:

        def write_log(more: Mapping[str, float]) -> None:
            log.write(json.dumps({**asdict(now), "loss": average, **more}) + "\n")
            log.flush()

        for loss in trainer.run(sources):
            average = loss if average == 0.0 else 0.95 * average + 0.05 * loss
            bar.n = round(now.seconds / 60, 2)
            bar.set_postfix(step=now.step, loss=f"{average:.3f}", tokens=f"{now.tokens / 1e6:.1f}M", refresh=False)
            bar.update(0)
            if now.step % 20 == 0:
                write_log({})
            if stopped or time.monotonic() - last_save > args.save_every * 60:
                write_log(measure_heldout(trainer.model))
                trainer.save()
                last_save = time.monotonic()
            if stopped:
                raise SystemExit(f"stopped at step {now.step}; the same command resumes")
        write_log(measure_heldout(trainer.model))
    trainer.save()


def read_tokens(path: Path) -> Ids:
    """Maps a .bin file's token ids into memory; they are read when they are used."""
    return np.memmap(path, dtype=np.uint16, mode="r")


def training_parser(description: str | None, run: str, minutes: float, dtype: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags of every training script. `run`, `minutes` and `dtype` are their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--run", default=run, help="name of the checkpoint and log (default: %(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=minutes,
        help="total training time, over all resumes (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default=dtype, help="of matrix products (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use (default: 2)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens in an update (default: %(default)s)")
    parser.add_argument("--micro-tokens", type=int, default=1024, help="tokens computed at once (default: %(default)s)")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak learning rate of Muon (default: 0.02)")
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate of AdamW (default: 0.003)")
    parser.add_argument("--save-every", type=float, default=3.0, help="minutes between checkpoints (default: 3)")
    parser.add_argument("--export-only", action="store_true", help="write the checkpoint's weights and stop")
    return parser


def use_cores() -> None:
    """Limits each kernel to one core, so that every core computes its own micro-batch."""
    torch.set_num_threads(1)
    keep_freed_memory()
