"""penstock as an application of Ray Serve: replicas that each run ``penstock serve``, behind Serve's proxies.

``serve run penstock.clients.ray:app model=demo num_replicas=2`` starts it. Needs the extra ``ray``.
"""

from penstock.clients.ray.application import app

__all__ = ["app"]
