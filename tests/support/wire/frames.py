"""Frames of a Generate stream, and one such stream with what it brought, for tests of the service."""

import asyncio
from collections.abc import Callable
from typing import Any

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor

TEXT = "The kernel reads each block of keys once, and the page table says where it is. " * 4
PIECES = [TEXT[at : at + 30] for at in range(0, len(TEXT), 30)]
KIND = pb.FrameKind.Name


def begin(ref: int = 1, max_tokens: int = 12, **fields: Any) -> pb.GenerateRequest:
    """A start; ``fields`` are those of GenerationStart."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, ignore_eos=True)
    output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)
    fields = {"sampling": sampling, "output": output} | fields
    return pb.GenerateRequest(start=pb.GenerationStart(ref=ref, **fields))


def append(ref: int = 1, **content: Any) -> pb.GenerateRequest:
    """An append; ``content`` has fields of GenerationAppend."""
    return pb.GenerateRequest(append=pb.GenerationAppend(ref=ref, **content))


def commit(ref: int = 1) -> pb.GenerateRequest:
    """A commit."""
    return pb.GenerateRequest(commit=pb.GenerationCommit(ref=ref))


def chat(*texts: str, role: str = "user", **fields: Any) -> pb.Chat:
    """A message for each text."""
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for text in texts], **fields)


def paced(seconds_per_step: float = 0.005, **options: Any) -> FakeExecutor:
    """A worker that takes its time, so that an output lives long enough to be changed."""
    return FakeExecutor(vocab_size=258, seconds_per_step=seconds_per_step, **options)


class Stream:
    """One multiplexed stream, and what it brought."""

    def __init__(self, service: Any, reading: Any, details_of: Callable[[Any], Any]) -> None:
        self.service = service
        self.details_of = details_of
        self.call = service.generation.Generate()
        self.reading = reading

    def reason_of(self, status: Any) -> str:
        """The reason in the details of a status."""
        reason: str = self.details_of(status)["ErrorInfo"].reason
        return reason

    async def send(self, *frames: pb.GenerateRequest) -> None:
        """Sends frames."""
        for frame in frames:
            await self.call.write(frame)

    async def until(self, enough: Callable[[], object]) -> None:
        """Reads until this is true."""
        async with asyncio.timeout(120):
            await self.reading.read_until(self.call, lambda reading: bool(enough()))

    def outcome(self, ref: int = 1) -> Any:
        """What a request has brought."""
        return self.reading.outcomes[ref]

    async def finished(self, ref: int = 1) -> pb.Finished:
        """The end of a request, for which it waits."""
        await self.until(lambda: self.outcome(ref).finished)
        end: pb.Finished = self.outcome(ref).finished[0]
        return end

    @property
    def refused(self) -> list[tuple[str, int, str]]:
        """The refused frames: kind, ref and reason."""
        return [
            (KIND(refused.frame).removeprefix("FRAME_KIND_"), refused.ref, self.reason_of(refused.status))
            for message in self.reading.messages
            for refused in message.frames_refused
        ]

    @property
    def injected(self) -> list[pb.Injected]:
        """What was injected."""
        return [each for message in self.reading.messages for each in message.injected]

    async def whole(self, **start: Any) -> pb.CompleteResponse:
        """The answer to the same prompt at once."""
        answer: pb.CompleteResponse = await self.service.generation.Complete(
            pb.CompleteRequest(start=begin(**start).start)
        )
        return answer
