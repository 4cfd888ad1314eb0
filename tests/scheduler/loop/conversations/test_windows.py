"""Blocks of layers with a window: how many a conversation holds, and what of it is computed again."""

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt

BLOCK_SIZE, WINDOW, NUM_GROUPS = 16, 100, 3
NUM_BEFORE = 7
"""Blocks before a border that a window of 100 reaches."""
MOST_IN_WINDOW = NUM_BEFORE + 512 // BLOCK_SIZE + 1


@pytest.fixture
def windowed(conversations_type):
    """A model whose layers are in four groups, three of them with a window of 100 tokens."""
    return conversations_type(num_window_groups=NUM_GROUPS, window=WINDOW)


def text(first, length):
    return [(first + 3 * position) % 1000 for position in range(length)]


@pytest.mark.parametrize("max_drafts", [0, 5])
def test_a_conversation_computes_only_what_is_new(windowed, max_drafts):
    history, computed = [], []
    for turn in range(43):
        history += text(7 * turn, 40)
        [output] = windowed.ask(history, max_tokens=30, max_drafts=max_drafts)
        computed.append(windowed.num_computed)
        history += output
    assert computed[0] == 40
    assert all(number <= 40 + 1 + BLOCK_SIZE - 1 for number in computed[1:])


def test_what_windows_hold_does_not_grow_with_the_prompt(windowed):
    held = []
    for length in (2000, 4000, 8000):
        windowed.scheduler.kv.flush()
        windowed.ask(text(0, length), max_tokens=50)
        held.append(windowed.most_held - -(-(length + 50) // BLOCK_SIZE))
    assert max(held) <= NUM_GROUPS * MOST_IN_WINDOW
    assert max(held) - min(held) <= NUM_GROUPS


def test_what_windows_hold_does_not_grow_with_the_output(windowed):
    windowed.ask(text(0, 50), max_tokens=1500)
    in_windows = windowed.most_held - -(-1550 // BLOCK_SIZE)
    # A block before the window, two that are written, and one that is not given up yet.
    assert in_windows <= NUM_GROUPS * (NUM_BEFORE + 4)


def test_four_choices_share_the_window_at_the_prompts_end(windowed):
    windowed.ask(text(0, 3000), max_tokens=20, n=4)
    assert windowed.num_computed <= 3000 + 3 * BLOCK_SIZE
    in_prompts = 3000 // BLOCK_SIZE + NUM_GROUPS * (NUM_BEFORE + 1)
    assert windowed.most_held <= in_prompts + 4 * (1 + NUM_GROUPS) * 4 + NUM_GROUPS * MOST_IN_WINDOW


def test_requests_that_share_a_long_beginning_begin_after_it(windowed):
    shared = text(0, 4096)
    windowed.ask(shared + text(1, 100), shared + text(2, 100), max_tokens=5)
    assert windowed.num_computed == 4096 + 2 * 100
    windowed.ask(shared + text(3, 100), max_tokens=5)
    assert windowed.num_computed == 100


def test_without_the_window_at_its_end_a_prefix_is_computed_again(windowed):
    prompt = text(0, 3000)
    windowed.ask(prompt, max_tokens=5)
    kv = windowed.scheduler.kv
    table = kv.windows.find(kv.first_hashes(_hashes(prompt)), 3000 // BLOCK_SIZE)
    assert not table.evicted
    # All other blocks are taken, in the order in which they are evicted, until the first of the window goes.
    taken = []
    while kv.windows.num_usable(_hashes(prompt), 3000 // BLOCK_SIZE) == 3000 // BLOCK_SIZE:
        taken += kv.pool.take_blocks(1)
    kv.pool.release(taken)
    assert len(kv.find_prefix(_hashes(prompt), 3000)) == 3000 // BLOCK_SIZE, "group 0 has everything"
    windowed.ask([*prompt, 1], [*prompt, 2], [*prompt, 3], max_tokens=5)
    assert 3000 - BLOCK_SIZE < windowed.num_computed < 3000 + 3 * BLOCK_SIZE, "one computes it, and the others wait"


def test_a_retained_context_keeps_its_window(windowed):
    history = text(0, 3000)
    [output] = windowed.ask(history, max_tokens=20, retain_s=1e6)
    for number in range(12):
        windowed.ask(text(number + 1, 7000), max_tokens=5)
    windowed.ask(history + output + text(5, 40), max_tokens=5)
    assert windowed.num_computed <= 40 + BLOCK_SIZE


@pytest.mark.parametrize("length", [16, 99, 100, 101, 112, 113, 2000])
def test_without_prefix_caching_nothing_is_kept(conversations_type, length):
    conversations = conversations_type(caches_prefixes=False, num_window_groups=NUM_GROUPS, window=WINDOW)
    for _ in range(2):
        conversations.ask(text(0, length), max_tokens=20, n=2)
        assert conversations.num_computed <= length + BLOCK_SIZE
    assert conversations.scheduler.kv.pool.num_cached == 0


def _hashes(token_ids):
    return hash_blocks(token_ids, BLOCK_SIZE, tenant_salt("fake", "default"))
