"""Everything that knows gRPC, and the composition root of the server; it never sees a tensor."""
