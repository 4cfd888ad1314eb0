"""A service without an engine: it answers by the contract, as the prompt tells it to.

Prompts, as text: ``endless`` goes on until it is cancelled; ``hang`` is accepted and no more; ``silent`` is not even
accepted; ``fail CODE`` fails; ``busy N`` is refused with a retry hint N times, then echoed; ``break`` ends the stream
that carries it; ``burst N`` sends N deltas at once. Every other prompt is echoed, a character a token; ``think`` at
its beginning is reasoning.
"""

import asyncio
import threading
import typing
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

import penstock.v1 as pb
from penstock.v1 import admin_pb2_grpc, model_pb2_grpc, tokenizer_pb2_grpc
from penstock.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def _details(*messages) -> list[Any]:
    packed = []
    for message in messages:
        any_message = Any()
        any_message.Pack(message)
        packed.append(any_message)
    return packed


class FakeService(
    GenerationServiceServicer, model_pb2_grpc.ModelServiceServicer, tokenizer_pb2_grpc.TokenizerServiceServicer
):
    """Remembers what it was asked, and answers."""

    def __init__(self) -> None:
        self.starts: list[pb.GenerationStart] = []
        self.cancelled: list[int] = []
        self.streams = 0
        self.streams_ended = 0
        self.metadata: dict[str, str] = {}
        self.health = SERVING
        self.key = ""
        self.delay = 0.0
        self.context_length = 2000
        self.sampling_defaults = pb.SamplingParams()
        self.break_next = 0
        self.refusals: Counter[str] = Counter()
        self.keeps = False
        self.kept: dict[str, int] = {}
        """Tokens of the contexts that may be continued."""
        self.gone = "CONTEXT_NOT_FOUND"
        """The reason of a continuation whose context is gone."""
        self.updates: list[pb.GenerationUpdate] = []
        self.on_start: Callable[[pb.GenerationStart], None] = lambda start: None
        self.target = ""

    async def Generate(self, request_iterator, context):
        self.streams += 1
        self.metadata = dict(context.invocation_metadata())
        outgoing: asyncio.Queue[pb.GenerateResponse | Exception | None] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}

        async def receive():
            async for frame in request_iterator:
                if frame.HasField("start"):
                    self.starts.append(frame.start)
                    self.on_start(frame.start)
                    has_context = not frame.start.continue_from or frame.start.continue_from in self.kept
                    answer = self._answer if has_context else self._miss
                    tasks[frame.start.ref] = asyncio.create_task(answer(frame.start, outgoing))
                elif frame.HasField("update"):
                    self._update(frame.update, outgoing)
                else:
                    for ref in frame.cancel.refs:
                        self.cancelled.append(ref)
                        tasks[ref].cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            outgoing.put_nowait(None)

        receiver = asyncio.create_task(receive())
        try:
            while (message := await outgoing.get()) is not None:
                if isinstance(message, Exception):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(message))
                yield message
        finally:
            self.streams_ended += 1
            for task in (receiver, *tasks.values()):
                task.cancel()

    def _update(self, update: pb.GenerationUpdate, outgoing) -> None:
        self.updates.append(update)
        if update.max_tokens > self.context_length:
            code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            info = _details(ErrorInfo(reason="INVALID_FIELD", domain="penstock.dev"))
            status = Status(code=code, message="too many", details=info)
            refused = pb.FrameRefused(ref=update.ref, status=status, frame=pb.FRAME_KIND_UPDATE)
            outgoing.put_nowait(pb.GenerateResponse(frames_refused=[refused]))

    async def _miss(self, start: pb.GenerationStart, outgoing) -> None:
        details = _details(ErrorInfo(reason=self.gone, domain="penstock.dev"))
        status = Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="no context is kept", details=details)
        outgoing.put_nowait(pb.GenerateResponse(finished=[pb.Finished(ref=start.ref, status=status)]))

    async def _answer(self, start: pb.GenerationStart, outgoing) -> None:
        def send(**fields):
            parts: dict[str, typing.Any] = {name: [value] for name, value in fields.items()}
            outgoing.put_nowait(pb.GenerateResponse(**parts))

        ref, sent = start.ref, 0
        request_id = f"R{ref:025d}"
        prompt = _prompt(start)
        prompt_tokens = len(prompt) + self.kept.get(start.continue_from, 0)

        def finish(code=0, message="", reason=pb.FINISH_REASON_STOP, details=()):
            usage = pb.Usage(prompt_tokens=prompt_tokens, cached_tokens=1, output_tokens=sent)
            status = Status(code=code, message=message, details=details)
            if self.keeps:
                self.kept[request_id] = prompt_tokens + sent
            send(
                finished=pb.Finished(
                    ref=ref,
                    status=status,
                    usage=usage,
                    reason=reason,
                    seed=start.sampling.seed,
                    request_id=request_id,
                    may_continue=request_id in self.kept,
                )
            )

        word, _, argument = prompt.partition(" ")
        if self.break_next:
            self.break_next -= 1
            word = "break"
        if word == "silent":
            await asyncio.Event().wait()
        if word == "fail":
            field = BadRequest.FieldViolation(field="sampling.top_p", description="must be above 0")
            info = ErrorInfo(reason="OUT_OF_BOUNDS", domain="penstock.dev")
            code = getattr(grpc.StatusCode, argument).value[0]
            finish(code, "as you wish", pb.FINISH_REASON_ERROR, _details(BadRequest(field_violations=[field]), info))
            return
        if word == "busy" and self.refusals[prompt] < int(argument):
            self.refusals[prompt] += 1
            retry = RetryInfo(retry_delay=Duration(nanos=1_000_000))
            finish(
                grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
                "the queue is full",
                pb.FINISH_REASON_ERROR,
                _details(retry),
            )
            return
        if word == "break":
            outgoing.put_nowait(ConnectionError("the worker is gone"))
            return
        send(accepted=pb.Accepted(ref=ref, request_id=request_id, prompt_tokens=prompt_tokens))
        try:
            if word == "hang":
                await asyncio.Event().wait()
            text = "x" * int(argument) if word == "burst" else prompt
            limit = start.sampling.max_tokens if start.sampling.HasField("max_tokens") else len(text)
            while word == "endless" or sent < min(limit, len(text)):
                await asyncio.sleep(self.delay)
                character = text[sent % len(text)]
                sent += 1
                ended = word != "endless" and sent == min(limit, len(text))
                for choice in range(max(1, start.sampling.n)):
                    end = pb.ChoiceEnd(reason=pb.FINISH_REASON_LENGTH if limit < len(text) else pb.FINISH_REASON_STOP)
                    delta = pb.Delta(
                        ref=ref, choice=choice, text=character, token_ids=[ord(character)], end=end if ended else None
                    )
                    if start.output.HasField("logprobs"):
                        delta.logprobs.chosen.append(-0.5)
                        delta.logprobs.text_lengths.append(1)
                        delta.logprobs.chosen_texts.extend([character.encode()] * start.output.include_token_texts)
                    _move_reasoning(delta, prompt, sent, start)
                    send(deltas=delta)
            finish(reason=pb.FINISH_REASON_LENGTH if limit < len(text) else pb.FINISH_REASON_STOP)
        except asyncio.CancelledError:
            finish(grpc.StatusCode.CANCELLED.value[0], "cancelled", pb.FINISH_REASON_CANCELLED)

    def GenerateOne(self, request, context):
        raise NotImplementedError

    async def Complete(self, request, context):
        raise NotImplementedError

    async def Prefetch(self, request, context):
        raise NotImplementedError

    async def Release(self, request, context):
        raise NotImplementedError

    async def GetModel(self, request, context):
        if self.key and dict(context.invocation_metadata()).get("authorization") != f"Bearer {self.key}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid API key")
        return pb.GetModelResponse(model=self._model)

    async def ListModels(self, request, context):
        """Two pages, unless all is asked for at once."""
        if request.page_size == 1000:
            return pb.ListModelsResponse(models=[self._model])
        if not request.page_token:
            return pb.ListModelsResponse(models=[self._model], next_page_token="2")
        return pb.ListModelsResponse(models=[pb.Model(name="other")])

    @property
    def _model(self) -> pb.Model:
        return pb.Model(
            name="fake",
            max_model_len=self.context_length,
            has_chat_template=True,
            sampling_defaults=self.sampling_defaults,
        )

    async def Tokenize(self, request, context):
        return pb.TokenizeResponse(token_ids=[ord(c) for c in request.text])

    async def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def DescribeTokens(self, request, context):
        tokens = [pb.TokenDescription(text=chr(token).encode()) for token in request.token_ids]
        return pb.DescribeTokensResponse(tokens=tokens)

    async def RenderChat(self, request, context):
        if not request.chat.messages:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "chat.messages: it is empty")
        text = "".join(f"<{m.role}>{m.content}" for m in request.chat.messages)
        return pb.RenderChatResponse(text=text, token_ids=[ord(c) for c in text])

    @asynccontextmanager
    async def serving(
        self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
    ) -> AsyncIterator["FakeService"]:
        """Answers on a port of its own."""

        async def check(request, context):
            return self.health

        server = grpc.aio.server()
        add_GenerationServiceServicer_to_server(self, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self, server)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Check": grpc.unary_unary_rpc_method_handler(check)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)])
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        await server.start()
        self.target = f"127.0.0.1:{port}"
        try:
            yield self
        finally:
            await server.stop(None)

    @contextmanager
    def on_a_thread(self, address: str = "127.0.0.1:0") -> Iterator["FakeService"]:
        """The same beside a test that has no event loop."""
        ready = threading.Event()
        stop: list[Callable[[], object]] = []

        async def main():
            loop, done = asyncio.get_running_loop(), asyncio.Event()
            stop.append(lambda: loop.call_soon_threadsafe(done.set))
            async with self.serving(address):
                ready.set()
                await done.wait()

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        assert ready.wait(120)
        try:
            yield self
        finally:
            stop[0]()
            thread.join()


def _move_reasoning(delta: pb.Delta, prompt: str, sent: int, start: pb.GenerationStart) -> None:
    if prompt.startswith("think") and sent <= len("think") and start.output.parse_reasoning:
        delta.text, delta.reasoning = "", delta.text


def _prompt(start: pb.GenerationStart) -> str:
    match start.WhichOneof("prompt"):
        case "token_ids":
            return "".join(map(chr, start.token_ids.ids))
        case "chat":
            return start.chat.messages[-1].content
        case _:
            return start.text


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """The administration of a service that is not there: tells what a test has put into it."""

    def __init__(self) -> None:
        self.explained: dict[str, pb.ExplainResponse] = {}
        self.stats: list[pb.WatchStatsResponse] = []
        """One after the other; then the service ends, unless it hangs."""
        self.hangs = False
        self.intervals: list[int] = []
        self.live: list[pb.LiveRequest] = []
        self.list_calls: list[pb.ListRequestsRequest] = []
        self.cancel_calls: list[pb.CancelRequestsRequest] = []
        self.target = ""
        self._leaving = threading.Event()

    def Explain(self, request, context):
        if request.request_id not in self.explained:
            context.abort(grpc.StatusCode.NOT_FOUND, "it is not among the last 1,000; --explain-requests keeps more")
        return self.explained[request.request_id]

    def ListRequests(self, request, context):
        """Knows no filter but the tenant's. A page token is the number of requests before the page."""
        self.list_calls.append(request)
        found = [live for live in self.live if request.filter.tenant in ("", live.tenant)]
        end = int(request.page_token or 0) + (request.page_size or 100)
        token = str(end) if end < len(found) else ""
        return pb.ListRequestsResponse(requests=found[int(request.page_token or 0) : end], next_page_token=token)

    def CancelRequests(self, request, context):
        self.cancel_calls.append(request)
        ids, tenant = request.ids.request_ids, request.filter.tenant
        gone = [live for live in self.live if (live.request_id in ids if ids else tenant in ("", live.tenant))]
        self.live = [live for live in self.live if live not in gone]
        unknown = [each for each in ids if each not in {live.request_id for live in gone}]
        return pb.CancelRequestsResponse(cancelled_requests=len(gone), unknown_request_ids=unknown)

    def WatchStats(self, request, context):
        self.intervals.append(request.interval.ToMilliseconds())
        yield from self.stats
        if self.hangs:
            self._leaving.wait()

    @contextmanager
    def serving(self) -> Iterator["FakeAdmin"]:
        """Answers on a port of its own."""
        server = grpc.server(ThreadPoolExecutor(4))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield self
        finally:
            self._leaving.set()
            server.stop(None).wait()
