"""One file for each gRPC service that callers use, and the interceptor around all calls."""
