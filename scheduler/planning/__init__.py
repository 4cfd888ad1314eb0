"""Chooses what the next step runs: queues, prefill, preemption, tenants' shares."""
