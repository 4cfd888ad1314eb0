"""Frames of a Generate stream, and one such stream with what it brought, for tests of the service."""

import asyncio

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor

TEXT = "The kernel reads each block of keys once, and the page table says where it is. " * 4
PIECES = [TEXT[at : at + 30] for at in range(0, len(TEXT), 30)]
KIND = pb.FrameKind.Name


def begin(ref=1, max_tokens=12, **fields):
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, ignore_eos=True)
    output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)
    fields = {"sampling": sampling, "output": output} | fields
    return pb.GenerateRequest(start=pb.GenerationStart(ref=ref, **fields))


def append(ref=1, **content):
    return pb.GenerateRequest(append=pb.GenerationAppend(ref=ref, **content))


def commit(ref=1):
    return pb.GenerateRequest(commit=pb.GenerationCommit(ref=ref))


def chat(*texts, role="user", **fields):
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for text in texts], **fields)


def paced(seconds_per_step=0.005, **options):
    return FakeExecutor(vocab_size=258, seconds_per_step=seconds_per_step, **options)


class Stream:
    """One multiplexed stream, and what it brought."""

    def __init__(self, service, reading, details_of):
        self.service = service
        self.details_of = details_of
        self.call = service.generation.Generate()
        self.reading = reading

    def reason_of(self, status):
        return self.details_of(status)["ErrorInfo"].reason

    async def send(self, *frames):
        for frame in frames:
            await self.call.write(frame)

    async def until(self, enough):
        async with asyncio.timeout(120):
            await self.reading.read_until(self.call, lambda reading: bool(enough()))

    def outcome(self, ref=1):
        return self.reading.outcomes[ref]

    async def finished(self, ref=1):
        await self.until(lambda: self.outcome(ref).finished)
        return self.outcome(ref).finished[0]

    @property
    def refused(self):
        """The refused frames: kind, ref and reason."""
        return [
            (KIND(refused.frame).removeprefix("FRAME_KIND_"), refused.ref, self.reason_of(refused.status))
            for message in self.reading.messages
            for refused in message.frames_refused
        ]

    @property
    def injected(self):
        return [each for message in self.reading.messages for each in message.injected]

    async def whole(self, **start):
        """The answer to the same prompt at once."""
        return await self.service.generation.Complete(pb.CompleteRequest(start=begin(**start).start))
