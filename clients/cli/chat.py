"""``penstock chat``: chats with a running service in the terminal."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import penstock.v1 as pb
from penstock.clients.chat_messages import ChatMessage
from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import (
    add_connection_flags,
    add_setting_flag,
    advised,
    connection,
    default_target,
    setting,
)
from penstock.clients.cli.terminal import Screen, line_reader, read_message
from penstock.clients.constraints import add_constraint_flags, constraint_settings
from penstock.clients.conversation import Conversation
from penstock.clients.errors import InvalidOption, PenstockError, RequestFailed, Unreachable
from penstock.clients.events import Delta, Finished
from penstock.clients.requests import Options
from penstock.clients.sync_client import Client

_HELP = '''\
/help              show this help
/reset             start a new conversation
/system TEXT       set the system message; without TEXT, show it; "/system -" removes it
/set NAME=VALUE    set a request option, such as temperature=0.7; "NAME=" restores its default; plain /set shows all
/stats             show speed and tokens of the last answer and of all answers
/exit              leave; Ctrl-D does the same
Ctrl-C stops the current answer. A line that ends in a backslash continues on the next line. All lines between two lines
of """ are one message.'''

_EPILOG = """\
examples:
  penstock chat
  penstock chat --target gpu1:50051 --system "Answer in one sentence." --set temperature=0
  penstock chat --once "Say hello."
  penstock chat --once "Is it so?" --choice yes --choice no
  penstock chat --once "A trip to Rome." --json-schema trip.json
  git diff | penstock chat --once -
"""

_RETAIN_MS = 600_000
"""How long the service keeps the context for the user's next message."""
_GONE = frozenset({pb.ERROR_REASON_CONTEXT_NOT_FOUND, pb.ERROR_REASON_CHAT_NOT_CONTINUABLE})
"""The errors if a service cannot continue a context: it was dropped, or the chat template does not allow it."""


@dataclass
class ChatAnswer:
    """The state of an answer while it arrives, with times measured by the client."""

    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    ended: float = 0.0
    text: str = ""
    num_tokens: int = 0
    finished: Finished | None = None

    def __str__(self) -> str:
        if self.first is None:
            return "no tokens"
        seconds = self.ended - self.first
        rate = f"{(self.num_tokens - 1) / seconds:,.1f} tokens/s" if self.num_tokens > 1 and seconds > 0 else "no rate"
        waited = (self.first - self.began) * 1000
        text = f"first token after {waited:,.0f} ms, {self.num_tokens:,} tokens, {rate}"
        if self.finished is None:
            return f"{text}, cancelled"
        usage = self.finished.usage
        prompt = f"prompt of {usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them cached"
        return f"{text}, ended by {self.finished.reason.value}; {prompt}"


class ChatSession:
    """A chat: the conversation, its options, and the speed of the answers."""

    def __init__(self, client: Client, model: pb.Model, screen: Screen) -> None:
        self._client = client
        self._context = model.max_model_len
        self._defaults = model.sampling_defaults
        self._screen = screen
        self._answers: list[ChatAnswer] = []
        self.conversation = Conversation(self._context, self._count_tokens)
        self.options: dict[str, object] = {"max_tokens": min(1024, self._context // 2)}

    def ask(self, text: str) -> bool:
        """Sends the user's message and shows the answer as it arrives. Ctrl-C ends the answer; the part so far is kept,
        and False is returned. Raises RequestFailed and TooLong; a message without an answer is dropped."""
        self._note_dropped(self.conversation.ask(text, self._room()))
        answer = ChatAnswer()
        try:
            try:
                self._receive(answer)
            except RequestFailed as failure:
                if not self.conversation.continue_from or failure.error_reason not in _GONE:
                    raise
                self._note_dropped(self.conversation.send_all(self._room()))
                self._receive(answer)
            return True
        except KeyboardInterrupt:
            self._screen.end_answer()
            self._screen.note("[cancelled]")
            return False
        finally:
            self._screen.end_answer()
            answer.ended = time.monotonic()
            if answer.first is not None or answer.finished is not None:  # a refused request has neither
                self._answers.append(answer)
            self.conversation.answer(answer.text, answer.finished)

    def set(self, name: str, value: object) -> None:
        """Sets an option; None restores its default. Raises InvalidOption."""
        if name in ("n", "format"):
            raise InvalidOption(name, "a chat has one answer per turn, as text")
        if name == "continue_from":
            raise InvalidOption(name, "a chat always continues from its own last answer")
        if value is None:
            self.options.pop(name, None)
        else:
            self.options[name] = value

    def settings(self) -> str:
        """Formats the options that are set, and the model's defaults for others."""
        lines = [f"{name} = {value}" for name, value in self.options.items()]
        lines += [
            f"{field.name} = {value:.6g} (the model's default)"
            for field, value in self._defaults.ListFields()
            if field.name not in self.options
        ]
        return "\n".join(lines) or "all options have their defaults"

    def stats(self) -> str:
        if not self._answers:
            return "no answer yet"
        num_tokens = sum(answer.num_tokens for answer in self._answers)
        seconds = sum(answer.ended - answer.began for answer in self._answers)
        total = f"{len(self._answers):,} answers, {num_tokens:,} tokens, {seconds:,.1f} s"
        return f"last: {self._answers[-1]}\nall: {total}; {self.conversation.num_turns:,} turns remembered"

    def _receive(self, answer: ChatAnswer) -> None:
        defaults = {"retain_ms": _RETAIN_MS, "parse_reasoning": True}
        given = {**defaults, **self.options, "continue_from": self.conversation.continue_from or None}
        timeout_ms = given.pop("timeout_ms", None)
        timeout = timeout_ms / 1000 if isinstance(timeout_ms, int) else None
        options: Options = {**given}  # type: ignore[typeddict-item]  # checked before
        with self._client.generate(self.conversation.unsent, timeout=timeout, **options) as request:
            for event in request:
                if isinstance(event, Delta):
                    answer.first = answer.first or time.monotonic()
                    answer.text += event.text
                    answer.num_tokens += len(event.token_ids)
                    self._screen.reasoning(event.reasoning)
                    self._screen.answer(event.text)
                elif isinstance(event, Finished):
                    answer.finished = event

    def _note_dropped(self, dropped: int) -> None:
        if dropped:
            what = "turn is" if dropped == 1 else f"{dropped} turns are"
            self._screen.note(f"[the context is full: the oldest {what} dropped]")

    def _room(self) -> int:
        """Returns the number of tokens to keep free for the answer."""
        limit = self.options.get("max_tokens")
        return limit if isinstance(limit, int) else self._context // 4

    def _count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        return len(self._client.render_chat(messages).token_ids)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    service = connection(arguments, arguments.target or default_target())
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    screen = Screen()
    with Client(service.target, api_key=service.api_key, tls=service.tls) as client:
        model = _describe(client)
        chat = ChatSession(client, model, screen)
        chat.conversation.system = arguments.system
        for name, value in [*arguments.settings, *constraint_settings(arguments)]:
            chat.set(name, value)
        if arguments.once is not None:
            is_whole = chat.ask(sys.stdin.read() if arguments.once == "-" else arguments.once)
            return 0 if is_whole else 130  # as in shells after Ctrl-C
        if sys.stdin.isatty():
            screen.note(
                f"{model.name} at {service.target}, context of {model.max_model_len:,} tokens; /help shows the commands"
            )
        return _talk(chat, screen)


def _talk(chat: ChatSession, screen: Screen) -> int:
    """Reads messages and commands until the end. The status is 0 on a terminal, where the user saw any failure; for a
    pipe it is 1 if anything failed."""
    read_line = line_reader()
    status = 0
    while True:
        try:
            text = read_message(read_line)
            if text.startswith("/"):
                if not _command(chat, screen, text):
                    return status
            elif text.strip():
                chat.ask(text)
        except KeyboardInterrupt:
            screen.note("\n[press Ctrl-D to leave]")
        except EOFError:
            if sys.stdin.isatty():
                screen.note("")
            return status
        except PenstockError as error:
            screen.error(str(error))
            status = 0 if sys.stdin.isatty() else 1


def _command(chat: ChatSession, screen: Screen, text: str) -> bool:
    """Runs a command; returns whether the chat continues."""
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    match name:
        case "/exit" | "/quit":
            return False
        case "/help":
            screen.note(_HELP)
        case "/reset":
            chat.conversation.reset()
            screen.note("[new conversation]")
        case "/system" if rest:
            chat.conversation.system = "" if rest == "-" else rest
        case "/system":
            screen.note(chat.conversation.system or "no system message")
        case "/set" if rest:
            chat.set(*setting(rest))
        case "/set":
            screen.note(chat.settings())
        case "/stats":
            screen.note(chat.stats())
        case _:
            raise PenstockError(f"unknown command {name}; /help shows the commands")
    return True


def _describe(client: Client) -> pb.Model:
    """Returns the served model. Raises PenstockError, with a remedy, if it cannot be used for chat."""
    try:
        with advised():
            model = client.model()
    except Unreachable as failure:
        raise PenstockError(
            f"{failure.message}\nstart one in another terminal: penstock serve\n"
            "or connect to a different one: penstock chat --target HOST:PORT"
        ) from None
    if not model.has_chat_template:
        raise PenstockError(f"{model.name} has no chat template; use penstock generate to send plain prompts")
    return model


def make_parser() -> argparse.ArgumentParser:
    """Defines the flags."""
    parser = CommandParser(
        "chat",
        "Chats with a running service in the terminal. Each turn sends only the new message, if the service still has\n"
        "the earlier ones.",
        f"in the chat:\n{_HELP}\n\n{_EPILOG}",
    )
    parser.add_argument(
        "--once", metavar="TEXT", help="send this message, print the answer and exit; - reads standard input"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    add_setting_flag(parser, "a request option, such as temperature=0.7; may be repeated")
    add_constraint_flags(parser)
    add_connection_flags(parser, "address of the service (default: $PENSTOCK_TARGET, or 127.0.0.1:50051)")
    return parser
