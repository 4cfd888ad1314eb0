"""The client for code without an event loop: runs the asynchronous client on its own thread.

with Client("127.0.0.1:50051") as client:
    print(client.complete("Once upon a time", max_tokens=20).text)
    for piece in client.stream("Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Self, TypeVar, Unpack

from penstock.clients.channel import DEFAULT_TARGET, Tls
from penstock.clients.chat_messages import ChatMessage, ChatOptions
from penstock.clients.classification import Classes, ClassifyOptions, ScoreOptions, Scores
from penstock.clients.client import AsyncClient
from penstock.clients.embeddings import Embeddings, EmbedOptions, Input
from penstock.clients.errors import PenstockError
from penstock.clients.events import Completion, Delta, Event
from penstock.clients.request_stream import RequestStream
from penstock.clients.requests import Options, Prompt
from penstock.v1 import Model, RenderChatResponse

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="penstock-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Runs a coroutine and waits for it; Ctrl-C cancels it. Raises PenstockError once the thread has ended."""
        if self._loop.is_closed():
            coroutine.close()
            raise PenstockError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, action: Callable[[], object]) -> None:
        """Schedules a call on the loop, in order; does nothing once the thread has ended."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(action)

    def end(self, last: Callable[[], Coroutine[object, object, None]]) -> None:
        """Runs a last coroutine and ends the thread."""

        def begin() -> None:
            self._loop.create_task(last()).add_done_callback(lambda _: self._loop.stop())

        self.call(begin)
        if threading.current_thread() is not self._thread:  # the garbage collector may call this from there
            self._thread.join()

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class SyncRequestStream:
    """One request as events. Leaving ``with`` or the loop before the end cancels it."""

    def __init__(self, request: RequestStream, thread: LoopThread, owner: "Client") -> None:
        self._request = request
        self._thread = thread
        self._owner = owner  # a client without references is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def __iter__(self) -> Iterator[Event]:
        try:
            while events := self.take():
                yield from events
        finally:
            self.leave()

    @property
    def request_id(self) -> str:
        """The service's id of the request; empty until it is accepted."""
        return self._request.request_id

    def take(self) -> list[Event]:
        """Waits for events and returns all since the last call. Returns an empty list once the request has ended."""
        return self._thread.run(self._request.take())

    def completion(self) -> Completion:
        """Collects the remaining events into a ``Completion``."""
        return self._thread.run(self._request.completion())

    def supersede(self, older: "SyncRequestStream") -> None:
        """Lets this request replace an older one of the same client. See ``RequestStream.supersede``."""
        self._thread.call(lambda: self._request.supersede(older._request))  # noqa: SLF001 - the same class

    def cancel(self) -> None:
        """Requests an early end. Events continue until ``Finished``, which has the usage so far."""
        self._thread.call(self._request.cancel)

    def update(
        self, *, timeout: float | None = None, priority: int | None = None, max_tokens: int | None = None
    ) -> None:
        """Changes the request while it runs. See ``RequestStream.update``."""

        async def update() -> None:
            self._request.update(timeout=timeout, priority=priority, max_tokens=max_tokens)

        self._thread.run(update())

    def append(self, content: Prompt, *, replace_from: int | None = None) -> int:
        """Adds to the open prompt, or to the output; returns its number. See ``RequestStream.append``."""

        async def append() -> int:
            return self._request.append(content, replace_from=replace_from)

        return self._thread.run(append())

    def commit(self) -> None:
        """Ends the open prompt: the output begins."""

        async def commit() -> None:
            self._request.commit()

        self._thread.run(commit())

    def leave(self) -> None:
        """Cancels the request, if it has not ended, and takes no more of its events. Safe to call twice."""
        self._thread.call(self._request.leave)


class Client:
    """Calls one service; safe to use from several threads. The parameters and errors are those of ``AsyncClient``."""

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        self.target = target
        self._client = AsyncClient(target, api_key=api_key, tls=tls)
        self._thread = LoopThread()
        # Without close(), the thread ends with the object or with the program.
        self._close = weakref.finalize(self, self._thread.end, self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> SyncRequestStream:
        """Returns a request as a stream of events. See ``AsyncClient.generate``."""
        return SyncRequestStream(self._client.generate(prompt, timeout=timeout, **options), self._thread, self)

    def open_prompt(
        self, prompt: Prompt = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> SyncRequestStream:
        """Returns a request whose prompt arrives in pieces. See ``AsyncClient.open_prompt``."""
        return SyncRequestStream(self._client.open_prompt(prompt, timeout=timeout, **options), self._thread, self)

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Iterator[Delta]:
        """Yields only the output, as it arrives. Leaving the loop cancels the request."""
        return _deltas(self.generate(prompt, timeout=timeout, **options))

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """Returns the whole answer. Raises RequestFailed."""
        return self._thread.run(self._client.complete(prompt, timeout=timeout, **options))

    def embed(
        self, inputs: str | Sequence[Input], *, timeout: float | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Returns a vector for each input. See ``AsyncClient.embed``."""
        return self._thread.run(self._client.embed(inputs, timeout=timeout, **options))

    def classify(
        self, inputs: str | Sequence[Input], *, timeout: float | None = None, **options: Unpack[ClassifyOptions]
    ) -> Classes:
        """Returns a value for each label, for each input. See ``AsyncClient.classify``."""
        return self._thread.run(self._client.classify(inputs, timeout=timeout, **options))

    def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Returns how relevant each document is to the query. See ``AsyncClient.score``."""
        return self._thread.run(self._client.score(query, documents, timeout=timeout, **options))

    def model(self, name: str = "") -> Model:
        """Returns a served model, by default the only one, and the service's limits."""
        return self._thread.run(self._client.model(name))

    def models(self) -> list[Model]:
        """Returns all served models."""
        return self._thread.run(self._client.models())

    def prefetch(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> int:
        """Computes a prompt that is expected soon. See ``AsyncClient.prefetch``."""
        return self._thread.run(self._client.prefetch(prompt, timeout=timeout, **options))

    def release(self, request_ids: Sequence[str], *, tenant: str = "") -> list[str]:
        """Gives up the contexts of ended requests. See ``AsyncClient.release``."""
        return self._thread.run(self._client.release(request_ids, tenant=tenant))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, the same as in a prompt."""
        return self._thread.run(self._client.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """Returns the text of token ids."""
        return self._thread.run(self._client.detokenize(token_ids, include_special_tokens=include_special_tokens))

    def render_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> RenderChatResponse:
        """Returns the prompt of a conversation, as text and as token ids."""
        return self._thread.run(self._client.render_chat(messages, **options))

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Waits until the service reports that it is serving. Raises RequestFailed after ``timeout`` seconds."""
        self._thread.run(self._client.wait_ready(timeout))

    def close(self) -> None:
        """Cancels running requests, closes the connection and ends the thread. Safe to call twice."""
        self._close()


def _deltas(request: SyncRequestStream) -> Iterator[Delta]:
    with request:
        for event in request:
            if isinstance(event, Delta):
                yield event
