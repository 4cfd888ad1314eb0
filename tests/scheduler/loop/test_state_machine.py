"""Scheduler and KV under random operations, checked after each one.

Figures 1 and 2 of the reliability targets: blocks and reference counts, and who wrote what a row reads.
"""

import pytest


def test_reliability_figure_1_500_sequences(explore, world_type):
    explore(world_type, 500, 20)


def test_100_sequences_with_recurrent_states(explore, stateful_world_type):
    explore(stateful_world_type, 100, 25)


def test_100_sequences_with_windows(explore, windowed_world_type):
    explore(windowed_world_type, 100, 25)


@pytest.mark.soak
def test_5000_sequences_of_150_operations_with_windows(explore, windowed_world_type):
    explore(windowed_world_type, 5000, 150)


@pytest.mark.soak
def test_5000_sequences_of_150_operations_with_recurrent_states(explore, stateful_world_type):
    explore(stateful_world_type, 5000, 150)


@pytest.mark.soak
def test_reliability_figure_1_10000_sequences_of_200_operations(explore, world_type):
    explore(world_type, 10_000, 200)


def test_reliability_figure_14_100_sequences_with_killers(explore, deadly_world_type):
    explore(deadly_world_type, 100, 20)


@pytest.mark.soak
def test_reliability_figure_14_5000_sequences_of_100_operations_with_killers(explore, deadly_world_type):
    explore(deadly_world_type, 5000, 100)
