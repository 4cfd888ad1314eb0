"""One file per gRPC service for callers, and the interceptor around all calls."""
