"""OpenVINO GenAI's continuous batching pipeline, in this process."""

import argparse
import itertools
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

from cpu_bench.wire import Ran, Ready, Request, Wire, run_engine

CACHE_GIB = 4


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Arithmetic in bf16; the KV cache as the flag says, or as the plugin does by itself."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = 32
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": arguments.threads, "INFERENCE_PRECISION_HINT": "bf16"}
    if arguments.kv:
        properties["KV_CACHE_PRECISION"] = arguments.kv
    pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
    wire.ready(
        Ready(f"openvino-genai {genai.__version__.partition('-')[0]}, openvino {ov.__version__.partition('-')[0]}")
    )
    numbers = itertools.count()
    for requests in wire.sets():
        wire.answer(_run(pipeline, numbers, requests))


def _run(pipeline: genai.ContinuousBatchingPipeline, numbers: "itertools.count[int]", requests: list[Request]) -> Ran:
    began = time.perf_counter()
    handles = []
    for prompt, num_output in requests:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_output
        config.ignore_eos = True
        config.do_sample = False
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        handles.append(pipeline.add_request(next(numbers), ids, config))
    events: list[list[tuple[float, int]]] = [[] for _ in requests]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter()
        for handle, noted in zip(handles, events, strict=True):
            while handle.can_read():
                num_tokens = sum(len(output.generated_ids) for output in handle.read().values())
                if num_tokens:
                    noted.append((now, num_tokens))
    return Ran(began, time.perf_counter(), events)


if __name__ == "__main__":
    run_engine(main, kv="")
