"""How much of a history is computed again: what conversations and shared prefixes save with recurrent states, and
without."""

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.simulation import checked_simulation
from penstock.scheduler.worker_config import WorkerFacts

BLOCK_SIZE, NUM_TURNS, NUM_NEW, NUM_OUTPUT = 16, 43, 40, 30


def user(turn, length=NUM_NEW):
    return [(7 * turn + position) % 1000 for position in range(length)]


def talk(conversations, **fields):
    """A conversation of 43 turns; returns what each turn had computed, and the prompts' lengths."""
    history: list[int] = []
    computed, lengths = [], []
    for turn in range(NUM_TURNS):
        history += user(turn)
        lengths.append(len(history))
        [output] = conversations.ask(history, max_tokens=NUM_OUTPUT, **fields)
        computed.append(conversations.num_computed)
        history += output
    print(
        f"{NUM_TURNS} turns of {NUM_NEW} new tokens, {max(lengths):,} at the end: computed {sum(computed):,} tokens of "
        f"prompts, at most {max(computed):,} in a turn"
    )
    return computed, lengths


@pytest.fixture(scope="module")
def plain(conversations_type):
    """What each turn computes beside plain attention."""
    computed, _ = talk(conversations_type(0))
    return computed


@pytest.mark.parametrize(("num_slots", "max_drafts"), [(100, 0), (3, 0), (100, 5)])
def test_a_turn_computes_what_is_new_and_less_than_a_block_of_what_is_old(
    conversations_type, plain, num_slots, max_drafts
):
    """The last token of an output is new as well: nothing followed it."""
    conversations = conversations_type(num_slots)
    computed, _ = talk(conversations, max_drafts=max_drafts)
    assert computed[0] == NUM_NEW
    assert all(number <= NUM_NEW + 1 + BLOCK_SIZE - 1 for number in computed[1:])
    assert computed == plain
    counters = conversations.scheduler.counters
    assert (counters.state_hits, counters.state_misses, counters.state_missed_tokens) == (NUM_TURNS - 1, 0, 0)


def test_without_slots_for_snapshots_a_turn_computes_everything(conversations_type):
    conversations = conversations_type(1)
    computed, lengths = talk(conversations)
    assert computed == lengths
    counters = conversations.scheduler.counters
    assert (counters.state_hits, counters.state_misses) == (0, NUM_TURNS - 1)
    assert counters.state_missed_tokens > sum(lengths) - NUM_TURNS * (NUM_NEW + 1 + BLOCK_SIZE)


def test_without_prefix_caching_a_turn_computes_everything(conversations_type):
    conversations = conversations_type(100, caches_prefixes=False)
    computed, lengths = talk(conversations)
    assert computed == lengths
    assert conversations.scheduler.kv.states.num_used == 0


SHARED = [(3 * position) % 1000 for position in range(8192)]


def test_prefixes_share_their_pages_and_one_snapshot(conversations_type):
    """The second one computes the shared part again, and saves its state at the end."""
    conversations = conversations_type(100)
    prompts = [SHARED + user(number, 100) for number in (1, 2, 3)]
    computed, histories = [], []
    for prompt in prompts:
        [output] = conversations.ask(prompt, max_tokens=NUM_OUTPUT)
        computed.append(conversations.num_computed)
        histories.append(prompt + output)
    assert computed == [8292, 8292, 100]
    assert conversations.snapshots(SHARED) == [8192]
    for prompt, history in zip(prompts, histories, strict=True):
        prompt_end, turn_end = ((len(each) - 1) // 16 * 16 for each in (prompt, history))
        assert set(conversations.snapshots(history)) <= {8192, prompt_end, turn_end}
        assert conversations.snapshots(history)[-1] == turn_end
    num_own = (len(histories[0]) - 1) // 16 - 512
    assert conversations.scheduler.kv.pool.num_cached == 512 + 3 * num_own
    counters = conversations.scheduler.counters
    assert (counters.state_hits, counters.state_misses, counters.state_missed_tokens) == (1, 1, 8192)


def test_prefixes_that_arrive_together_are_computed_once(conversations_type):
    """The others wait for the first one, which saves its state where they part."""
    conversations = conversations_type(100)
    prompts = [SHARED + user(number, 100) for number in (1, 2, 3)]
    conversations.ask(*prompts, max_tokens=1)
    assert conversations.num_computed == 8192 + 3 * 100
    assert conversations.snapshots(SHARED) == [8192]


def test_after_a_miss_the_others_wait_for_one_row(conversations_type):
    """KV is cached, and no state: one computes it again for all."""
    conversations = conversations_type(100)
    conversations.ask(SHARED + user(1, 100), max_tokens=1)
    conversations.ask(*(SHARED + user(number, 100) for number in (2, 3, 4)), max_tokens=1)
    assert conversations.num_computed == 8192 + 3 * 100
    assert conversations.scheduler.counters.state_misses == 1


def test_a_prompt_that_ends_at_a_border_serves_those_that_continue_it(conversations_type):
    """They wait for its result: the last token might be computed again."""
    conversations = conversations_type(100)
    prompt = SHARED[:496]
    conversations.ask(prompt, prompt + user(1, 100), max_tokens=1)
    assert conversations.num_computed == 496 + 100
    conversations.ask(prompt + user(2, 100), max_tokens=1)
    assert conversations.num_computed == 100


def test_choices_begin_at_the_last_border_of_their_prompt(conversations_type):
    conversations = conversations_type(100)
    conversations.ask(user(1, 100), n=4)
    assert conversations.num_computed == 100 + 3 * (100 - 96)
    conversations.ask(user(1, 100))
    assert conversations.num_computed == 100 - 96


def test_choices_compute_the_prompt_where_no_state_can_be_saved(conversations_type):
    conversations = conversations_type(1)
    conversations.ask(user(1, 100), n=2)
    assert conversations.num_computed == 200


def test_a_simulation_with_states():
    """Its worker checks each state, and its requests take turns."""
    rest = (4096, 4, 256, "fake", "fake", "cpu", "float32", "float32", 0, 0)
    facts = WorkerFacts(600, 16, 1000, *rest, num_state_slots=9)
    simulation = checked_simulation(facts, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256))
    outcomes = [simulation.ask(0.2 * number, 50, 20, history=SHARED[:400], max_drafts=3) for number in range(20)]
    simulation.run()
    assert all(outcome.num_tokens == 20 for outcome in outcomes)
    assert sum(outcome.num_computed for outcome in outcomes) < 20 * (50 + 2 * 16 + 40) + 800
    assert simulation.scheduler.counters.state_hits >= 18
