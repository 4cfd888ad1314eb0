"""A run's figures: as JSON, and as tables to read."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from gpu_bench.parts import Results

Line = dict[str, Any]
Column = tuple[str, Callable[[Line], str]]


def as_json(results: Results) -> dict[str, Any]:
    """Everything, in seconds, bytes and operations."""
    left_out = [asdict(what) for what in results.left_out]
    return {"about": results.about, **results.tables, "left_out": left_out}


def as_text(results: Results) -> str:
    """Tables in Markdown, without those that are empty, and what was left out."""
    about = ", ".join(f"{name} {value}" for name, value in results.about.items())
    texts = [about]
    for name, columns in COLUMNS.items():
        if lines := results.tables[name]:
            texts.append(f"{TITLES[name]}\n\n" + _table(columns, lines))
    if results.left_out:
        texts.append("\n".join(["Left out:", *(f"- {out.part}: {out.what}: {out.why}" for out in results.left_out)]))
    return "\n\n".join(texts)


def _table(columns: Iterable[Column], lines: Iterable[Line]) -> str:
    columns = list(columns)
    rows = [[name for name, _ in columns], ["---"] * len(columns)]
    rows += [[text(line) for _, text in columns] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _plain(name: str) -> Callable[[Line], str]:
    return lambda line: str(line[name])


def _number(name: str, scale: float, digits: int = 1) -> Callable[[Line], str]:
    return lambda line: "" if line[name] is None else f"{line[name] * scale:,.{digits}f}"


def _share(name: str) -> Callable[[Line], str]:
    return lambda line: f"{line[name]:.0%}"


def _both(first: str, second: str, scale: float) -> Callable[[Line], str]:
    one, other = _number(first, scale), _number(second, scale)
    return lambda line: f"{one(line)} / {other(line)}" if line[first] is not None else ""


_ERROR: list[Column] = [
    ("error", lambda line: f"{line['error']:.1e} of {line['allowed']:.1e}"),
    ("", lambda line: "" if line["is_right"] else "WRONG"),
]
TITLES = {
    "ceilings": "What the device does at best",
    "kernels": "Kernels: the error beside what is allowed, and the share of the limit",
    "host_memory": "The first token of a prompt whose KV was evicted",
    "accuracy": "Whole models beside the reference in fp32: log-probabilities of the likeliest tokens",
    "decode": "Steps of decoding",
    "prefill": "Prompts, computed alone",
    "turns": "The next turn of a chat: a few new tokens on a context that is in pages",
    "choices": "Products of few tokens: the kernels and cuBLAS, as measured at the start",
    "variants": "Steps with one choice made otherwise",
    "profile": "Steps by kernel: the device's time per step",
    "deterministic": "The cost of --deterministic, in steps of decoding",
    "start": "From start to SERVING",
    "serving": "Requests at once: tokens a second of output, and times at p50 / p99",
}
COLUMNS: dict[str, list[Column]] = {
    "ceilings": [
        ("copies, GB/s", _number("copied_bytes_per_s", 1e-9)),
        ("products, TFLOP/s", _number("products_per_s", 1e-12)),
    ],
    "kernels": [
        ("model", _plain("model")),
        ("kernel", _plain("kernel")),
        ("input", _plain("case")),
        *_ERROR,
        ("us", _number("seconds", 1e6)),
        ("limit", _plain("limit")),
        ("share", _share("share")),
    ],
    "accuracy": [
        ("model", _plain("model")),
        ("prompts", lambda line: f"{line['rows']} of up to {line['longest']}"),
        *_ERROR,
        ("same likeliest token", _share("same_tokens")),
    ],
    "decode": [
        ("model", _plain("model")),
        ("KV", _plain("kv")),
        ("batch", _plain("batch")),
        ("context", _plain("context")),
        ("step, ms", _number("step_s", 1e3, 2)),
        ("floor, ms", _number("floor_s", 1e3, 2)),
        ("share", _share("share")),
        ("between steps, us", _number("between_s", 1e6)),
    ],
    "prefill": [
        ("model", _plain("model")),
        ("tokens", _plain("tokens")),
        ("ms", _number("seconds", 1e3)),
        ("TFLOP/s", _number("products_per_s", 1e-12)),
        ("share", _share("share")),
    ],
    "turns": [
        ("model", _plain("model")),
        ("context", _plain("context")),
        ("new tokens", _plain("tokens")),
        ("ms", _number("seconds", 1e3, 2)),
        ("floor, ms", _number("floor_s", 1e3, 2)),
        ("share", _share("share")),
    ],
    "choices": [
        ("model", _plain("model")),
        ("weight", lambda line: f"{line['rows']} x {line['columns']}"),
        ("tokens", _plain("tokens")),
        ("kernels, us", _number("kernels_s", 1e6)),
        ("cuBLAS, us", _number("torch_s", 1e6)),
        ("chosen", lambda line: "cuBLAS" if line["is_torchs"] else "kernels"),
    ],
    "variants": [
        ("model", _plain("model")),
        ("variant", _plain("variant")),
        ("step", _plain("step")),
        ("ms", _number("seconds", 1e3, 2)),
        ("of the time as it is", _share("ratio")),
    ],
    "profile": [
        ("model", _plain("model")),
        ("step", _plain("step")),
        ("kernel", _plain("kernel")),
        ("launches", _number("calls", 1)),
        ("us", _number("seconds", 1e6)),
        ("share", _share("share")),
    ],
    "host_memory": [
        ("model", _plain("model")),
        ("tokens", _plain("tokens")),
        ("computed again, ms", _number("computed_s", 1e3)),
        ("from host memory, ms", _number("restored_s", 1e3)),
        ("came back", lambda line: f"{line['restored_tokens']} tokens, {line['copied_bytes'] / 1e6:,.1f} MB"),
        ("", lambda line: "byte-equal" if line["is_right"] else "OTHER BYTES"),
    ],
    "deterministic": [
        ("model", _plain("model")),
        ("batch", _plain("batch")),
        ("context", _plain("context")),
        ("tokens/s", _number("tokens_per_s", 1)),
        ("with the flag", _number("deterministic_tokens_per_s", 1)),
        ("cost", _share("cost")),
        ("a row alone gets", lambda line: "the same tokens" if line["same_tokens"] else "OTHERS"),
    ],
    "start": [("model", _plain("model")), ("Triton's cache", _plain("cache")), ("s", _number("seconds", 1))],
    "serving": [
        ("model", _plain("model")),
        ("engine", _plain("engine")),
        ("requests", lambda line: f"{line['requests']}, {line['concurrency']} at a time"),
        ("prompt + output", lambda line: f"{line['prompt_tokens']} + {line['output_tokens']}"),
        ("tokens/s", _number("tokens_per_s", 1)),
        ("first token, ms", _both("first_token_p50_s", "first_token_p99_s", 1e3)),
        ("between tokens, ms", _both("between_tokens_p50_s", "between_tokens_p99_s", 1e3)),
        ("ours is", lambda line: "" if line["ratio"] is None else f"{line['ratio']:.2f}x"),
    ],
}
"""Of each table: a column's title, and what stands in it."""
