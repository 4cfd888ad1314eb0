"""Trains the demo model within a budget of minutes; stops and resumes at any time.

Sequences start at 256 tokens and grow to 2,048. trainer.py describes the training and when checkpoints are written. The
finished model is written to --out.

Cost: 35 million floating-point operations per token, without attention. The model's card has the time on two CPU cores.
The time on a GPU was not measured; at 20 TFLOP/s, which a model of this size should reach, 20 million tokens take 35
seconds.

Examples:
    nice -n 19 python train.py --minutes 100
    python train.py --minutes 5 --device cuda --micro-tokens 8192 --out /data/demo
    python train.py --minutes 100 --export-only
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from penstock.models.train_demo.evaluate import measure, windows
from penstock.models.train_demo.export import write_config, write_weights
from penstock.models.train_demo.network import Decoder, DecoderShape
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER
from penstock.models.train_demo.trainer import Trainer, read_tokens, train, training_parser, use_cores

STAGES = ((0.0, 256), (0.4, 512), (0.75, 1024), (0.9, 2048))


def main() -> None:
    """Trains within the budget and writes the model."""
    parser = training_parser(__doc__, run="checkpoint", minutes=100.0, dtype="bfloat16")
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    args = parser.parse_args()
    use_cores()
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    trainer = Trainer(partial(Decoder, DecoderShape()), Decoder.loss, STAGES, args)
    if not args.export_only:
        sample = list(windows(args.work / "heldout.jsonl", tokenizer, 1024, 120))

        def bits(model: Decoder) -> Mapping[str, float]:
            whole = measure(model, sample, args.device, quiet=True)["all"]
            return {"heldout_sample_bits_per_byte": whole.bits_per_byte}

        train(trainer, [read_tokens(args.work / "train.bin")], bits)
    write_config(trainer.model.shape, tokenizer, args.out)
    size = write_weights(trainer.model.state_dict(), args.out)
    print(f"step {trainer.progress.step}, {trainer.progress.tokens:,} tokens, model.safetensors {size:,} bytes")


if __name__ == "__main__":
    main()
