"""Matrix products with quantised weights in Triton: int4, int8, fp8."""
