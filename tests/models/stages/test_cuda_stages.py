"""Stages on the kernels for GPUs, in Triton's interpreter: the tokens of one process in plain torch."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from hosts.stage_ranks import StagedExecutor

from penstock.models.executor.group import _of_rank
from penstock.models.executor.spawn import QUIET
from penstock.models.executor.wire import FrameKind, encode_frame
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.worker_config import Meeting

SAMPLED = SamplingParams(
    seed=11, temperature=0.9, top_k=20, repetition_penalty=1.2, min_tokens=2, stop_token_ids=(3, 4), prompt_logprobs=0
)
RANK = """
import socket, sys
from penstock.models.executor.wire import Channel
from penstock.models.worker.main import serve

with socket.socket(fileno=int(sys.argv[1])) as connection:
    serve(Channel(connection))
"""
"""Rank 1. It cannot be a thread, since the interpreter runs one kernel at a time."""


@contextmanager
def another_rank(config):
    """A process with this config. It ends with the links to rank 0."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-c", RANK, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**QUIET, **os.environ}) as process:
        theirs.close()
        ours.sendall(encode_frame(FrameKind.CONFIG, config))
        yield
    assert process.returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the kernels in Triton's interpreter")
async def test_stages_give_the_tokens_of_one_process(build_model, worker_config, in_process, start_engine, tmp_path):
    pytest.importorskip("triton")
    tiny = {"num_hidden_layers": 2, "vocab_size": 33, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    path = build_model(tmp_path / "llama", "LlamaConfig", tiny).path
    config = {"num_blocks": 4, "max_model_len": 16, "max_num_seqs": 2}
    whole = await start_engine(in_process(path, **config))
    staged = {"backend": "cuda", "max_num_batched_tokens": 16, "pipeline_parallel_size": 2, "stage_layers": (1, 1)}
    ranks = worker_config(path, **config, **staged, meeting=Meeting(str(tmp_path)))
    executor = StagedExecutor(ranks)
    with another_rank(_of_rank(ranks, 1)):
        engine = await start_engine(executor)
        facts = engine.engine.facts
        assert (facts.backend, facts.stage_layers) == ("cuda", (1, 1))
        answers, expected = [await each.run([[7, 3, 15, 21, 9], [30, 2]], SAMPLED, 3) for each in (engine, whole)]
        for answer, known in zip(answers, expected, strict=True):
            assert answer.token_ids == known.token_ids
            [ours_of_prompt], [theirs_of_prompt] = answer.prompt_logprobs, known.prompt_logprobs
            assert ours_of_prompt.logprobs.chosen == pytest.approx(theirs_of_prompt.logprobs.chosen, abs=1e-4)
        executor.close_links()
