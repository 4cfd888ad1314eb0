"""OpenAI's HTTP API in front of the gRPC service: an ASGI app that is one of the service's clients."""
