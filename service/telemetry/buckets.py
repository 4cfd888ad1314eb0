"""The bounds of the histograms' buckets, in seconds or in tokens."""

# From OpenTelemetry's conventions for generative AI.
GENAI_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GENAI_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
GENAI_OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# vLLM's bounds: a quantile over several replicas needs the same buckets on all of them.
VLLM_FIRST_TOKEN = (*GENAI_FIRST_TOKEN, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
VLLM_OUTPUT_TOKEN = (*GENAI_OUTPUT_TOKEN, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
# penstock's own bounds: small models produce a token, and requests leave the queue, in less than a millisecond.
FINE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)

FIRST_TOKEN_BOUNDS = VLLM_FIRST_TOKEN
"""Each of these four holds the bounds of all metrics that are read from the same histogram."""
OUTPUT_TOKEN_BOUNDS = tuple(sorted({*VLLM_OUTPUT_TOKEN, *FINE}))
REQUEST_BOUNDS = tuple(sorted({*VLLM_REQUEST, *GENAI_DURATION, *FINE}))
TOKEN_BOUNDS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)
