"""The floors, against figures worked out by hand and known from elsewhere."""

import pytest
from cpu_bench import workloads
from cpu_bench.floors import SHAPES, Machine, Shape, tokens_per_s

TINY = Shape(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, intermediate=3, vocab=5)


def test_the_weights_are_those_of_the_models() -> None:
    assert SHAPES["M1"].layer_weights == 28 * (1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072)
    assert SHAPES["M1"].head_weights == 151_936 * 1024
    assert SHAPES["M1"].kv_numbers == 2 * 28 * 8 * 128


def test_by_hand() -> None:
    assert (TINY.layer_weights, TINY.head_weights, TINY.kv_numbers) == (2 * 2 * 4 + 3 * 2 * 3, 10, 4)
    # Two tokens of prompt, three of output: two steps of decoding, over contexts of 3 and 4 less one each.
    machine = Machine(bytes_per_s=10.0, bf16_operations_per_s=100.0, int8_operations_per_s=200.0)
    prefill = (2 * 34 * 2 + 2 * 10) / 100 + 4 * 2 * (2**2 / 2) / 100
    decode = (2 * 44 * 2 + (3 + 4) * 8) / 10
    assert tokens_per_s(machine, TINY, [([1, 2], 3)], "bf16") == pytest.approx(3 / (prefill + decode))


def test_int8_reads_and_computes_keys_and_values_in_eight_bits_too() -> None:
    machine = Machine(bytes_per_s=10.0, bf16_operations_per_s=100.0, int8_operations_per_s=200.0)
    prefill = (2 * 34 * 2 + 2 * 10 + 4 * 2 * (2**2 / 2)) / 200
    decode = (44 * 2 + (3 + 4) * 4) / 10
    assert tokens_per_s(machine, TINY, [([1, 2], 3)], "int8") == pytest.approx(3 / (prefill + decode))


def test_where_arithmetic_is_slow_it_is_the_limit_of_decoding_too() -> None:
    machine = Machine(bytes_per_s=1e9, bf16_operations_per_s=1.0, int8_operations_per_s=2.0)
    decode = 2 * 44 * 2
    prefill = 2 * 34 * 2 + 2 * 10 + 4 * 2 * 2
    assert tokens_per_s(machine, TINY, [([1, 2], 3)], "bf16") == pytest.approx(3 / (prefill + decode))


@pytest.mark.parametrize(("name", "wanted"), [("W1", 146), ("W2", 46), ("W3", 102), ("W4", 21)])
def test_the_floors_of_a_known_machine(name: str, wanted: float) -> None:
    machine = Machine(bytes_per_s=41e9, bf16_operations_per_s=440e9, int8_operations_per_s=870e9)
    shared = workloads.SHARED_PREFIX.get(name, 0)
    found = tokens_per_s(machine, SHAPES["M1"], workloads.build(name, 0), "bf16", shared)
    assert found == pytest.approx(wanted, rel=0.02)
    assert tokens_per_s(machine, SHAPES["M1"], workloads.build(name, 0), "int8", shared) > 1.4 * found
