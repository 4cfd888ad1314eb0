"""``penstock bench``: measures latency and throughput of a running service. Knows no server code."""
