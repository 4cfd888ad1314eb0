"""Equal hashes mean equal histories of one tenant on one model."""

from hypothesis import given, strategies as st

from penstock.kv.block_hash import hash_blocks, tenant_salt

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SALT = tenant_salt("model", "tenant")


@given(TOKENS, st.integers(1, 7), st.integers(0, 5))
def test_hashing_on_from_a_parent_is_hashing_the_whole(tokens, block_size, num_first):
    whole = hash_blocks(tokens, block_size, SALT)
    first = hash_blocks(tokens[: num_first * block_size], block_size, SALT)
    rest = hash_blocks(tokens[num_first * block_size :], block_size, SALT, first[-1] if first else b"")
    assert first + rest == whole
    assert len(whole) == len(tokens) // block_size


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_blocks_are_equal_up_to_the_first_difference(one, other):
    def common_prefix(left, right):
        return next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )

    hashes = hash_blocks(one, 4, SALT), hash_blocks(other, 4, SALT)
    assert common_prefix(*hashes) == common_prefix(one, other) // 4


def test_fields_cannot_run_into_each_other():
    tokens = list(range(16))
    salts = [tenant_salt("ab", "c"), tenant_salt("a", "bc"), tenant_salt("abc", ""), tenant_salt("", "abc"), b"", b"\0"]
    assert len({hash_blocks(tokens, 16, salt)[0] for salt in salts}) == len(salts)
    parents = [b"", b"\0", b"\0\0", b"parent"]
    assert len({hash_blocks(tokens, 16, SALT, parent)[0] for parent in parents}) == len(parents)
    assert hash_blocks([0] * 16, 16, SALT)[0] != hash_blocks([0] * 16, 8, SALT)[0]


def test_a_hash_never_changes():
    """Other processes may hold these: a change is a new tag."""
    assert hash_blocks(list(range(4)), 4, b"salt")[0].hex() == (
        "f19da9af3fc0b2cf4faed5bb29327ca27cbd46d368ca8f71899a5a86367e445b"
    )
