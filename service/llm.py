"""A model as a library: a private service and its client, behind two calls.

with LLM("demo", max_model_len=2048) as llm:
    for answer in llm.generate(["The kernel is", "A package is"], max_tokens=32, temperature=0):
        print(answer.text)
"""

import asyncio
import weakref
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, Self, Unpack, cast

from tqdm import tqdm

from penstock.clients.chat_messages import ChatMessage
from penstock.clients.client import AsyncClient
from penstock.clients.errors import PenstockError
from penstock.clients.events import Completion
from penstock.clients.requests import Options, Prompt
from penstock.clients.sync_client import LoopThread
from penstock.service.app.embedded import local_service

_CONCURRENCY = 256
"""Concurrent requests: enough to fill every step, and fewer than the queue's limit."""


class LLM:
    """A loaded model. ``close`` it, or use it in ``with``, to free its memory; otherwise it ends with the object or the
    program."""

    def __init__(self, model: str = "demo", **flags: object) -> None:
        """Loads the model and returns when it is ready. ``flags`` are those of ``penstock serve``.

        Raises LocalServiceError.
        """
        resources = ExitStack()
        self.target: str | None = resources.enter_context(local_service(model, **flags))
        """The service's address, for a client of your own; None once it is closed."""
        # A thread of its own, since a notebook already runs a loop in the caller's.
        self._thread, self._client = LoopThread(), AsyncClient(self.target)
        resources.callback(self._thread.end, self._client.close)
        self._close = weakref.finalize(self, resources.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        progress: bool = False,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Completes prompts concurrently and returns the completions in the prompts' order. ``prompts`` is a text, or
        a list of texts or of lists of token ids.

        ``options`` are the sampling parameters, with the names that the protos give them. Raises InvalidOption, and
        RequestFailed for the first request that fails.
        """
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        return self._run(self._answer(listed, options, progress))

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        *,
        progress: bool = False,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Returns the next turn of a conversation, or of each conversation of a list. Otherwise like ``generate``."""
        one = bool(messages) and isinstance(messages[0], dict)
        conversations = cast(Sequence[Prompt], [messages] if one else messages)
        return self._run(self._answer(conversations, options, progress))

    def close(self) -> None:
        """Ends the service. Safe to call twice."""
        self.target = None
        self._close()

    def _run(self, answers: Coroutine[Any, Any, list[Completion]]) -> list[Completion]:
        if self.target is None:
            answers.close()
            raise PenstockError("the model is closed")
        return self._thread.run(answers)

    async def _answer(self, prompts: Sequence[Prompt], options: Options, progress: bool) -> list[Completion]:
        turn = asyncio.Semaphore(_CONCURRENCY)
        await self._client.wait_ready()  # on a busy machine connecting may take long
        with tqdm(total=len(prompts), unit=" answers", disable=not progress) as bar:

            async def answer(prompt: Prompt) -> Completion:
                async with turn:
                    completion = await self._client.complete(prompt, **options)
                bar.update()
                return completion

            answers = [asyncio.ensure_future(answer(prompt)) for prompt in prompts]
            try:
                return await asyncio.gather(*answers)
            finally:  # after the first failure, the others are of no use
                for each in answers:
                    each.cancel()
