"""OpenVINO GenAI's continuous batching pipeline, in this process."""

import argparse
import itertools
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

from cpu_bench.schedule import Schedule
from cpu_bench.wire import Ran, Ready, Wire, Work, run_engine

CACHE_GIB = 4


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Arithmetic in bf16; the KV cache as the flag says, or as the plugin does by itself. Without bfloat16 in the
    processor, the plugin computes in float32, and refuses a KV cache in bf16."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = 32
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": arguments.threads, "INFERENCE_PRECISION_HINT": "bf16"}
    if arguments.kv:
        has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        properties["KV_CACHE_PRECISION"] = arguments.kv if has_bf16 else "f32"
    pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
    wire.ready(
        Ready(f"openvino-genai {genai.__version__.partition('-')[0]}, openvino {ov.__version__.partition('-')[0]}")
    )
    numbers = itertools.count()
    for work in wire.sets():
        wire.answer(_run(pipeline, numbers, work))


def _run(pipeline: genai.ContinuousBatchingPipeline, numbers: "itertools.count[int]", work: Work) -> Ran:
    schedule = Schedule(work)
    handles = {}
    while not schedule.is_over:
        for arrival in schedule.take_due():
            config = genai.GenerationConfig()
            config.max_new_tokens = arrival.num_output
            config.ignore_eos = True
            config.do_sample = False
            ids = ov.Tensor(np.array([arrival.prompt], dtype=np.int64))
            handles[arrival.number] = pipeline.add_request(next(numbers), ids, config)
        if not handles:
            schedule.sleep_to_next()
            continue
        if pipeline.has_non_finished_requests():
            pipeline.step()
        now = time.perf_counter()
        for number, handle in list(handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    schedule.add_tokens(number, output.generated_ids, now)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                schedule.finish(number, now)
                del handles[number]
    return schedule.ran()


if __name__ == "__main__":
    run_engine(main, kv="")
