"""The worker process: it receives plans, runs steps and returns tokens."""
