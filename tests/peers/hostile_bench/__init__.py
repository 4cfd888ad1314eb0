"""A live service, a well-behaved tenant, and attackers: see tests/bench/hostile.py."""
