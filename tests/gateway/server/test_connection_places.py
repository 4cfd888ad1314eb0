"""Which connections give way."""

import hashlib
import resource

from penstock.clients.gateway.server.connection_places import ConnectionPlaces


class Connection:
    """Ends when it is cut, as real ones do a moment later."""

    num_unread = 0
    is_cut = False

    def __init__(self, tenant=""):
        self.tenant = tenant

    def cut(self):
        self.is_cut = True


def entered(places, number):
    connections = [Connection() for _ in range(number)]
    for each in connections:
        places.enter(each)
    return connections


def test_silent_connections_give_way_before_those_that_had_requests():
    places = ConnectionPlaces(3, 1000)
    served, *silent = entered(places, 3)
    places.mark_busy(served)
    places.end(served)
    entered(places, 4)
    assert all(each.is_cut for each in silent)
    assert not served.is_cut


def test_the_one_that_is_idle_for_longest_gives_way():
    places = ConnectionPlaces(3, 1000)
    first, second, third = entered(places, 3)
    places.mark_busy(first)
    places.mark_busy(second)
    places.end(first)
    entered(places, 1)
    assert [each.is_cut for each in (first, second, third)] == [False, False, True]


def test_none_gives_way_that_answers_or_is_being_read_from():
    places = ConnectionPlaces(2, 1000)
    answering, reading = entered(places, 2)
    places.mark_busy(answering)
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


def test_several_that_come_before_one_has_ended_each_have_another_give_way():
    places = ConnectionPlaces(3, 1000)
    idle = entered(places, 3)
    entered(places, 2)
    assert [each.is_cut for each in idle] == [True, True, False]
    for each in idle[:2]:
        places.leave(each)
    entered(places, 1)
    assert idle[2].is_cut


def behind(places, tenant, num_bytes):
    connection = Connection(tenant)
    places.enter(connection)
    connection.num_unread = num_bytes
    places.fall_behind(connection)
    return connection


def test_where_too_much_is_unread_the_most_of_the_tenant_with_the_most_ends():
    places = ConnectionPlaces(10, 1000)
    slow = behind(places, "slow", 400)
    many = [behind(places, "many", num_bytes) for num_bytes in (150, 200, 150)]
    assert not any(each.is_cut for each in (slow, *many))
    last = behind(places, "many", 150)
    assert [each.is_cut for each in (slow, *many, last)] == [False, False, True, False, False]
    places.leave(many[1])
    assert not behind(places, "other", 150).is_cut


def test_what_was_read_meanwhile_counts_no_more():
    places = ConnectionPlaces(10, 1000)
    first, second = behind(places, "a", 500), behind(places, "b", 500)
    first.num_unread = 100
    third = behind(places, "b", 400)
    assert not any(each.is_cut for each in (first, second, third))
    places.catch_up(second)
    fourth = behind(places, "c", 500)
    assert not any(each.is_cut for each in (first, second, third, fourth))


def test_connections_are_looked_at_only_when_too_much_may_be_unread():
    """Each that falls behind would else look at all that are."""

    class Watched:
        tenant = ""
        num_looks = 0

        @property
        def num_unread(self):
            self.num_looks += 1
            return 1

        def cut(self):
            raise AssertionError("there is room")

    places, connections = ConnectionPlaces(2000, 1000), [Watched() for _ in range(1000)]
    for each in connections:
        places.fall_behind(each)
    assert max(each.num_looks for each in connections) <= 2


def test_open_files_bound_the_connections(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (160, 160))
    assert ConnectionPlaces(4096, 1000).max_connections == 96
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert ConnectionPlaces(4096, 1000).max_connections == 4096


async def test_a_connection_knows_the_tenant_that_is_answered(start_gateway, load_keys, tmp_path):
    key = "1" * 40
    path = tmp_path / "keys"
    path.write_text(f"sha256:{hashlib.sha256(key.encode()).hexdigest()} one")
    gateway = await start_gateway(service={"authenticator": load_keys(path)}, seconds_per_step=0.01)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as streamed:
        assert streamed.status_code == 200
        [connection] = gateway.app.state.gateway_metrics._connections
        assert connection.tenant == "one"
    assert (await gateway.http.get("/version")).status_code == 200
    assert "" in {each.tenant for each in gateway.app.state.gateway_metrics._connections}
