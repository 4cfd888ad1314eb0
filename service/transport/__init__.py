"""The gRPC listener: connections, limits on calls and messages, early refusals."""
