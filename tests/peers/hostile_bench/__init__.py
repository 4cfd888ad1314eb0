"""Attackers, a well-behaved tenant and a service for ``tests/bench/serving/hostile.py``."""
