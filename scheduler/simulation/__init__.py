"""The scheduler and the KV manager in virtual time: step logs, the costs that are fitted to them, and replicas."""
