"""Joins the hosts that share a model: the leader accepts the agents of the others, and each agent runs the ranks of its
host. Imports no torch."""
