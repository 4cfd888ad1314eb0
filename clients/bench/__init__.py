"""``penstock bench``: measures latency and throughput of a running service. Imports no server code."""
