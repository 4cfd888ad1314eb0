"""Publishes the changes of the prefix cache over ZeroMQ, in vLLM's format, for routers that keep an index of it."""
