"""Decides what runs next, in pure Python. It does not depend on gRPC or tensors."""
