"""Products with quantized weights in Triton: int4, int8, fp8."""
