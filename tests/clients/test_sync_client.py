"""The client for code without a loop: the same surface, on a thread of its own."""

import gc
import inspect
import subprocess
import sys
import threading

import pytest
from waiting import wait_until

from penstock.clients import (
    AsyncClient,
    Client,
    Delta,
    Finished,
    InvalidOption,
    PenstockError,
    RequestFailed,
    RequestStream,
)
from penstock.clients.sync_client import SyncRequestStream


def public(cls):
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def test_the_surface_is_that_of_the_asynchronous_client():
    assert public(AsyncClient) - public(Client) == {"send"}
    assert public(RequestStream) <= public(SyncRequestStream) | {"request_id"}
    for name in ("generate", "stream", "complete", "tokenize", "detokenize", "render_chat", "wait_ready"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (Client, AsyncClient))
        assert ours.parameters == theirs.parameters


def test_calls_in_one_line(threaded_service):
    target = threaded_service.target
    assert Client(target).complete("hello", max_tokens=4).text == "hell"
    assert "".join(piece.text for piece in Client(target).stream("hello")) == "hello"
    assert [type(event) for event in Client(target).generate("x")][-1] is Finished


def test_unary_calls(threaded_service):
    with Client(threaded_service.target) as client:
        client.wait_ready(5)
        assert client.model().name == "fake"
        assert len(client.models()) == 2
        assert client.detokenize(client.tokenize("ab")) == "ab"
        assert client.render_chat([{"role": "user", "content": "hi"}]).text == "<user>hi"


def test_updates(threaded_service):
    with Client(threaded_service.target) as client, client.generate("endless") as request:
        request.take()
        with pytest.raises(InvalidOption):
            request.update(max_tokens=-1)
        request.update(priority=2)
        wait_until(lambda: threaded_service.updates)
        assert threaded_service.updates[0].priority == 2


@pytest.mark.parametrize("leave", ["loop", "with", "stream"])
def test_leaving_cancels(threaded_service, leave):
    with Client(threaded_service.target) as client:
        match leave:
            case "loop":
                for event in client.generate("endless"):
                    if isinstance(event, Delta):
                        break
            case "with":
                with client.generate("endless") as request:
                    request.take()
            case "stream":
                for _ in client.stream("endless"):
                    break
        wait_until(lambda: threaded_service.cancelled)
        assert client.complete("on").text == "on"
    assert threaded_service.streams == 1


def test_failures_are_raised_here(threaded_service):
    with Client(threaded_service.target) as client, pytest.raises(RequestFailed, match="INVALID_ARGUMENT"):
        client.complete("fail INVALID_ARGUMENT")


def test_threads_share_a_client(threaded_service):
    answers: list[str] = []
    with Client(threaded_service.target) as client:
        threads = [
            threading.Thread(target=lambda i=i: answers.append(client.complete(f"number {i}").text)) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [f"number {i}" for i in range(8)]
    assert threaded_service.streams == 1


def test_a_closed_client_raises_a_clear_error(threaded_service):
    client = Client(threaded_service.target)
    request = client.generate("endless")
    request.take()
    client.close()
    client.close()
    with pytest.raises(PenstockError, match="the client is closed"):
        client.complete("hi")
    request.leave()


def test_an_unreferenced_client_ends_its_thread(threaded_service):
    before = threading.active_count()
    client = Client(threaded_service.target)
    client.complete("hi")
    del client
    gc.collect()
    wait_until(lambda: threading.active_count() <= before)


def test_a_program_that_never_closes_its_client_ends_quietly(threaded_service):
    program = (
        "from penstock.clients import Client\n"
        f"client = Client({threaded_service.target!r})\n"
        "stream = client.stream('endless')\n"
        "print(next(stream).text)"
    )
    command = [sys.executable, "-P", "-W", "error", "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"e\n", b"")
    wait_until(lambda: threaded_service.streams_ended == 1)
