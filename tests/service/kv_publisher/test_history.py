"""The number of waiting batches is limited; dropped ones leave a gap, and can be replayed while they are kept."""

from penstock.service.kv_publisher.history import BatchHistory


def published(history):
    numbers = []
    while (batch := history.take_unpublished()) is not None:
        numbers.append(batch[0])
    return numbers


def kept(history):
    number, numbers = 0, []
    while (batch := history.find_from(number)) is not None:
        assert batch[1] == str(batch[0]).encode()
        numbers.append(batch[0])
        number = batch[0] + 1
    return numbers


def add_batches(history, numbers):
    for number in numbers:
        history.add_batch(str(number).encode())


def test_batches_beyond_the_queue_are_a_gap_that_can_be_sent_again():
    history = BatchHistory(num_kept=5, max_queued=2)
    add_batches(history, range(5))
    assert (history.num_dropped, history.num_batches) == (3, 5)
    assert published(history) == [3, 4]
    assert kept(history) == [0, 1, 2, 3, 4]
    add_batches(history, [5])
    assert published(history) == [5]
    assert kept(history) == [1, 2, 3, 4, 5]
    assert history.num_dropped == 3


def test_without_replays_nothing_is_kept():
    history = BatchHistory(num_kept=0, max_queued=3)
    add_batches(history, range(4))
    assert published(history) == [1, 2, 3]
    assert kept(history) == []


def test_the_bytes_of_all_batches_are_limited():
    history = BatchHistory(num_kept=100, max_queued=100, max_bytes=3)
    add_batches(history, range(9))
    assert history.num_dropped == 6
    assert published(history) == kept(history) == [6, 7, 8]
    history.add_batch(b"large")
    assert published(history) == [9], "a batch that is larger than the limit is published"


def test_what_is_not_published_yet_is_not_sent_again():
    history = BatchHistory(num_kept=9, max_queued=9)
    add_batches(history, range(3))
    assert kept(history) == []
    history.take_unpublished()
    assert kept(history) == [0]
