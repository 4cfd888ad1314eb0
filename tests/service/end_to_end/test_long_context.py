"""A model with a longer context than memory holds starts, and reports the context that it has."""

import json
import subprocess
import urllib.request
from pathlib import Path

from serve_process import http_target_of, serving, target_of, write_small_model

from penstock.clients import Client


def test_a_model_with_262144_positions_starts_with_what_fits(tmp_path: Path) -> None:
    model = write_small_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 262_144}))
    flags = ("--port=0", "--http-port=0", "--kv-cache-memory-bytes=1M", "--dtype=float32")
    with serving(model, *flags, stdin=subprocess.DEVNULL) as (_, greeting):
        with Client(target_of(greeting)) as client:
            reported = client.model().max_model_len
        with urllib.request.urlopen(f"http://{http_target_of(greeting)}/v1/models", timeout=60) as response:
            [listed] = json.load(response)["data"]
    assert 1024 <= reported < 262_144
    assert listed["max_model_len"] == reported
    assert f"context {reported:,}\n" in greeting
