"""inference.GRPCInferenceService, the Open Inference Protocol v2 of KServe and Triton: a translation to penstock.v1 and
back."""
