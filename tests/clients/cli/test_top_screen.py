"""The screen of ``penstock top``: what keys change of it, and what fits on a terminal."""

import pytest

import penstock.v1 as pb
from penstock.clients.cli.admin.top_screen import Key, ScreenAction, TopScreen
from penstock.clients.cli.as_dict import duration_of

STATS = pb.WatchStatsResponse(state=pb.SERVICE_STATE_SERVING, uptime=duration_of(5), live_requests=3)


def live(name, **fields):
    request = pb.LiveRequest(request_id=name, state=pb.REQUEST_STATE_WAITING, tenant="acme", num_choices=1)
    request.MergeFrom(pb.LiveRequest(**fields))
    return request


def make_screen(**changes):
    screen = TopScreen("here", **{"unicode": False, "colours": False, "has_keys": True} | changes)
    screen.update(STATS)
    return screen


@pytest.fixture
def screen():
    """One that lists three requests."""
    screen = make_screen()
    assert screen.press(Key.REQUESTS) is ScreenAction.LIST
    screen.set_requests([live("a"), live("b"), live("c")])
    return screen


def text(screen, columns=100, rows=30):
    lines = screen.lines(columns, rows)
    assert len(lines) < rows
    assert all(len(line) < columns for line in lines)
    return "\n".join(line.rstrip() for line in lines)


def selected(screen):
    [marked] = [line for line in text(screen).splitlines() if line.startswith("> ")]
    return marked.split()[1]


def test_statistics_first_and_the_list_on_a_key():
    screen = make_screen()
    assert "requests   3 live" in text(screen)
    assert text(screen).endswith("\nr requests   q quit")
    assert screen.press(Key.REQUESTS) is ScreenAction.LIST
    assert screen.press(Key.REQUESTS) is ScreenAction.DRAW
    assert "requests   3 live" in text(screen)
    assert screen.press(Key.CANCEL) is ScreenAction.DRAW
    assert "y cancels" not in text(screen)


def test_the_list(screen):
    screen.set_requests(
        [
            pb.LiveRequest(
                request_id="01KAH3Y5W7Q2R8T4V6X0Z1B3C5",
                client_request_id="order-7",
                tenant="acme",
                state=pb.REQUEST_STATE_DECODING,
                age=duration_of(12.34),
                prompt_tokens=1024,
                output_tokens=120,
                max_tokens=512,
                num_choices=1,
            ),
            live("b", max_tokens=16, num_choices=3),
        ]
    )
    assert (
        text(screen)
        == """\
penstock top   here   SERVING   up 0:00:05

3 live requests; the oldest 2 are listed
  request                     state          age, s    prompt    output   at most  tenant
> 01KAH3Y5W7Q2R8T4V6X0Z1B3C5  decoding         12.3     1,024       120       512  acme  order-7
  b                           waiting           0.0         0         0    16 x 3  acme

up and down select   x cancel   r statistics   q quit"""
    )


def test_the_selection_stays_on_its_request(screen):
    screen.press(Key.DOWN)
    assert selected(screen) == "b"
    screen.set_requests([live("b"), live("c"), live("d")])
    assert selected(screen) == "b"
    screen.set_requests([live("c"), live("d")])
    assert selected(screen) == "c"
    screen.press(Key.UP)
    assert selected(screen) == "c"
    for _ in range(5):
        screen.press(Key.DOWN)
    assert selected(screen) == "d"
    screen.set_requests([])
    assert "> " not in text(screen)
    screen.press(Key.DOWN)
    screen.set_requests([live("e")])
    assert selected(screen) == "e"


def test_a_cancellation_needs_a_second_key_and_names_its_request(screen):
    screen.press(Key.DOWN)
    assert screen.press(Key.CANCEL) is ScreenAction.DRAW
    assert "cancel b? y cancels it" in text(screen)
    screen.set_requests([live("c")])  # it does not become another one meanwhile
    assert "cancel b? y cancels it" in text(screen)
    assert screen.press(Key.CONFIRM) is ScreenAction.CANCEL
    assert screen.to_cancel == "b"
    assert screen.press(Key.CONFIRM) is ScreenAction.DRAW


@pytest.mark.parametrize("key", [key for key in Key if key is not Key.CONFIRM])
def test_any_other_key_cancels_nothing(screen, key):
    screen.press(Key.CANCEL)
    assert screen.press(key) is ScreenAction.DRAW
    assert "y cancels" not in text(screen)
    assert screen.press(Key.CONFIRM) is ScreenAction.DRAW


def test_quit(screen):
    assert screen.press(Key.QUIT) is ScreenAction.QUIT


def test_an_outcome_is_shown_until_the_next_key(screen):
    screen.message = "b was cancelled"
    assert text(screen).endswith("\nb was cancelled")
    screen.press(Key.OTHER)
    assert "was cancelled" not in text(screen)


@pytest.mark.parametrize("rows", [8, 10, 24])
def test_a_long_list_shows_the_part_with_the_selected_one(screen, rows):
    screen.set_requests([live(f"r{number:02}") for number in range(50)])
    for number in range(50):
        assert f"\n> r{number:02} " in text(screen, columns=60, rows=rows)
        screen.press(Key.DOWN)


@pytest.mark.parametrize("rows", [4, 8, 12, 100])
def test_the_statistics_are_cut_and_the_keys_stay(rows):
    assert text(make_screen(), columns=40, rows=rows).endswith("\nr requests   q quit")
    assert "quit" not in text(make_screen(has_keys=False), columns=40, rows=rows)


@pytest.mark.parametrize("rows", [2, 3])
def test_on_a_tiny_terminal_nothing_scrolls(screen, rows):
    assert text(screen, rows=rows).startswith("penstock top")
    screen.press(Key.REQUESTS)
    assert text(screen, rows=rows).startswith("penstock top")


def test_colours():
    coloured = make_screen(colours=True)
    assert coloured.lines(80, 24)[0].startswith("\x1b[1;32mpenstock top")
    coloured.press(Key.REQUESTS)
    coloured.set_requests([live("a")])
    assert [line[:6] for line in coloured.lines(80, 24) if "> a" in line] == ["\x1b[7m> "]
