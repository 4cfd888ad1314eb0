"""Builds documents in chat format from structured data: WordNet, package descriptions, manual pages and GNOME help.

A conversation is a list of (role, content). `render` writes it in ChatML, like the demo model's chat template. Callers
pass the text; this module reads no files.
"""

import random
import re
import textwrap
from collections.abc import Iterator

Conversation = list[tuple[str, str]]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Debian, its packages and its documentation.",
    "Answer briefly.",
    "You are penstock's demo model, a very small language model.",
)

IDENTITY = (
    "I am penstock's demo model: a language model of fewer than six million parameters, trained on free documentation.",
    "I'm the demo model that comes with penstock. I am very small, so please check what I say.",
    (
        "I am a tiny language model. I was trained on the documentation of Debian packages, and I am here so that "
        "penstock can be tried without a download."
    ),
)
ABILITIES = (
    "I can describe Debian packages, say what a command does, and define English words. I am often wrong.",
    "I know a little about Debian, Python, the Linux kernel and PostgreSQL, and I can define words. Don't rely on me.",
)
PENSTOCK = (
    (
        "penstock is an asyncio gRPC service that serves language models. A penstock is the gated pipe that feeds a "
        "turbine."
    ),
    "penstock serves language models over gRPC: requests stream in, tokens stream out.",
)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there"),
        ("Hello! What can I do for you?", "Hi! How can I help?", "Hello! Ask me about a package, a command or a word."),
    ),
    (("Who are you", "What are you", "Tell me about yourself", "What is your name", "Are you a person"), IDENTITY),
    (("What can you do", "What can I ask you", "How can you help me", "What do you know", "Help"), ABILITIES),
    (("What is penstock", "Tell me about penstock", "What does penstock do"), PENSTOCK),
    (
        ("Thank you", "Thanks", "Thanks a lot", "Thank you very much"),
        ("You're welcome!", "You're welcome. Is there anything else?", "My pleasure."),
    ),
    (
        ("How are you", "How are you today", "How is it going"),
        ("I'm well, thank you. What would you like to know?", "Fine, thanks! How can I help?"),
    ),
    (("Goodbye", "Bye", "See you", "Good night"), ("Goodbye!", "Bye! Come back any time.", "See you!")),
    (
        ("Are you always right", "Can I trust you", "Do you make mistakes"),
        ("No. I am a very small model and I make many mistakes, so check what I say.",),
    ),
)


def render(conversation: Conversation) -> str:
    """Returns the conversation in ChatML, with special tokens as text."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in conversation)


def with_system_prompt(conversation: Conversation, rng: random.Random) -> Conversation:
    """Returns the conversation. One in five gets a system prompt."""
    return [("system", rng.choice(SYSTEM_PROMPTS)), *conversation] if rng.random() < 0.2 else conversation


def about_package(name: str, summary: str, body: str, rng: random.Random) -> Conversation:
    """Returns a conversation about a Debian package: a question, and the package's description as the reply."""
    ask = (
        "What is the package {0}?",
        "What is {0}?",
        "Describe the package {0}.",
        "Tell me about the Debian package {0}.",
        "What does the package {0} contain?",
        "what is {0}",
    )
    question = rng.choice(ask).format(name)
    if body and rng.random() < 0.3:
        more = rng.choice(("Tell me more.", "Can you say more?", "Explain it in detail.", "More, please."))
        return [
            ("user", question),
            ("assistant", f"{name} is described as: {summary}."),
            ("user", more),
            ("assistant", body),
        ]
    return [("user", question), ("assistant", f"{summary}.\n\n{body}" if body else f"{summary}.")]


def about_words(entries: list[tuple[str, str]], rng: random.Random) -> Conversation:
    """Returns a conversation with one question and reply for each (word, definitions)."""
    ask = ('What does "{0}" mean?', "What is the meaning of {0}?", "Define {0}.", "define {0}", "What does {0} mean?")
    turns: Conversation = []
    for word, definition in entries:
        turns += [("user", rng.choice(ask).format(word)), ("assistant", definition)]
    return turns


def about_manual(name: str, section: str, page: str, rng: random.Random) -> Conversation | None:
    """Returns a conversation about a manual page: its summary, then sometimes its synopsis. Returns None if the page
    has no summary."""
    found = re.search(r"^NAME\n +(.+?) - (.+?)\n\n", page, flags=re.DOTALL)
    if not found:
        return None
    summary = re.sub(r"\s+", " ", found[2]).rstrip(".")
    kind = {"1": "command", "8": "command", "2": "system call", "3": "function", "5": "file format"}.get(
        section[:1], "page"
    )
    ask = ("What does the {1} {0} do?", "What is {0}?", "What is the {1} {0} for?", "Explain the {1} {0}.")
    turns: Conversation = [("user", rng.choice(ask).format(name, kind)), ("assistant", f"{name}: {summary}.")]
    synopsis = re.search(r"^SYNOPSIS\n(.+?)\n\n?(?=^\S)", page, flags=re.DOTALL | re.MULTILINE)
    if synopsis and len(synopsis[1]) < 800 and rng.random() < 0.7:
        again = rng.choice(("How do I use it?", "What is its synopsis?", "How is it called?", f"How do I use {name}?"))
        turns += [("user", again), ("assistant", textwrap.dedent(synopsis[1]).strip())]
    return turns


def about_help(page: str, rng: random.Random) -> Conversation | None:
    """Returns a conversation with the title of a GNOME help page as the question and the page as the reply; None for a
    page with little text."""
    title, _, body = page.partition("\n\n")
    if len(body) < 100:
        return None
    lower = title[:1].lower() + title[1:]
    ask = ("How do I {1}?", "{0}", "Explain: {0}", "Help me with this: {0}")
    return [("user", rng.choice(ask).format(title, lower)), ("assistant", body.strip())]


def small_talk(rng: random.Random, count: int) -> Iterator[Conversation]:
    """Yields `count` short conversations made from templates."""
    for _ in range(count):
        turns: Conversation = []
        for questions, answers in rng.sample(SMALL_TALK, rng.choice((1, 1, 2, 3))):
            question = rng.choice(questions)
            end = (
                rng.choice(("?", "?", ""))
                if question.startswith(("Wh", "How", "Are", "Can", "Do"))
                else rng.choice(("", ".", "!"))
            )
            turns += [("user", rng.choice((question, question.lower())) + end), ("assistant", rng.choice(answers))]
        yield turns
