"""Which connections give way."""

import resource

from penstock.clients.gateway.connection_places import ConnectionPlaces


class Connection:
    """Ends when it is cut, as real ones do a moment later."""

    num_unread = 0
    is_cut = False

    def cut(self):
        self.is_cut = True


def entered(places, number):
    connections = [Connection() for _ in range(number)]
    for each in connections:
        places.enter(each)
    return connections


def test_the_one_that_is_idle_for_longest_gives_way():
    places = ConnectionPlaces(3, 1000)
    first, second, third = entered(places, 3)
    places.begin(first)
    places.begin(second)
    places.end(first)
    entered(places, 1)
    assert [each.is_cut for each in (first, second, third)] == [False, False, True]


def test_none_gives_way_that_answers_or_is_being_read_from():
    places = ConnectionPlaces(2, 1000)
    answering, reading = entered(places, 2)
    places.begin(answering)
    reading.num_unread = 10
    entered(places, 1)
    assert not answering.is_cut
    assert not reading.is_cut


def test_one_that_has_ended_takes_no_place():
    places = ConnectionPlaces(1, 1000)
    [first] = entered(places, 1)
    places.leave(first)
    [second] = entered(places, 1)
    assert not second.is_cut


def test_the_ones_that_are_behind_for_longest_end_when_too_much_is_unread():
    places = ConnectionPlaces(10, 1000)
    first, second, third, fourth = entered(places, 4)
    for each, num_bytes in ((first, 300), (second, 300), (third, 300)):
        each.num_unread = num_bytes
        places.fall_behind(each)
    places.catch_up(first)
    fourth.num_unread = 800
    places.fall_behind(fourth)
    assert [each.is_cut for each in (first, second, third, fourth)] == [False, True, True, False]


def test_open_files_bound_the_connections(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (160, 160))
    assert ConnectionPlaces(4096, 1000).max_connections == 96
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert ConnectionPlaces(4096, 1000).max_connections == 4096
