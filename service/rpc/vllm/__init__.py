"""vllm.grpc.engine.VllmEngine, the contract between the gateway smg and vLLM: a translation to penstock.v1 and back."""
