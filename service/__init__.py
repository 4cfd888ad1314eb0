"""The gRPC side of penstock and the composition root of the server. Handles no tensors."""
