"""A model that several hosts share: the leader in ``penstock serve --nnodes``, and ``penstock worker`` elsewhere."""
