"""``penstock chat`` with pipes, and on a terminal."""

import os
import signal

import pytest
from waiting import wait_until

import penstock.v1 as pb

TEMPLATE_TOKENS = len("<user>")


@pytest.fixture
def chat(tool, threaded_service):
    """Runs it with this text on standard input."""

    def run(text="", *arguments):
        return tool.run("chat", "--target", threaded_service.target, *arguments, text=text)

    return run


def test_each_line_of_a_pipe_is_a_turn_and_only_answers_come_out(chat, threaded_service):
    done = chat("hello\nhow are you?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\nhow are you?\n", "")
    contents = [[message.content for message in start.chat.messages] for start in threaded_service.starts]
    assert contents == [["hello"], ["hello", "hello", "how are you?"]]


def test_reasoning_is_shown_apart_from_the_answer(chat, threaded_service):
    done = chat("think yes\n")
    assert (done.stdout, done.stderr) == (" yes\n", "think\n")
    assert [start.output.parse_reasoning for start in threaded_service.starts] == [True]


def contents_sent(service):
    return [[message.content for message in start.chat.messages] for start in service.starts]


def test_a_turn_sends_only_what_is_new_where_the_service_has_the_rest(chat, threaded_service):
    threaded_service.keeps = True
    done = chat("one\ntwo\nthree\n/reset\nfour\n/system brief\nfive\n", "--system", "long")
    assert done.stdout.split() == ["one", "two", "three", "four", "five"]
    assert contents_sent(threaded_service) == [
        ["long", "one"],
        ["two"],
        ["three"],
        ["long", "four"],
        ["brief", "four", "four", "five"],
    ]
    starts = threaded_service.starts
    assert [bool(start.continue_from) for start in starts] == [False, True, True, False, False]
    assert starts[1].continue_from != starts[2].continue_from
    assert all(start.retain_ms > 0 for start in starts)


def test_a_question_that_failed_leaves_the_context_as_it_was(chat, threaded_service):
    threaded_service.keeps = True
    chat("one\nfail INTERNAL\ntwo\n")
    _, failed, second = threaded_service.starts
    assert failed.continue_from == second.continue_from != ""
    assert contents_sent(threaded_service)[2] == ["two"]


@pytest.mark.parametrize("reason", ["CONTEXT_NOT_FOUND", "CHAT_NOT_CONTINUABLE"])
def test_where_the_context_is_gone_all_is_sent(chat, threaded_service, reason):
    threaded_service.keeps = True
    requests = []

    def forget(start):
        requests.append(start)
        if len(requests) == 2:
            threaded_service.kept.clear()

    threaded_service.on_start = forget
    threaded_service.gone = reason
    done = chat("one\ntwo\nthree\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\nthree\n", "")
    assert contents_sent(threaded_service) == [["one"], ["two"], ["one", "one", "two"], ["three"]]


def test_a_context_that_grows_too_long_is_sent_anew_without_its_oldest_turns(chat, threaded_service):
    threaded_service.keeps = True
    threaded_service.context_length = 120
    done = chat("a" * 20 + "\nb\n" + "c" * 30 + "\n", "--set", "max_tokens=40")
    assert "[the context is full: the oldest turn is dropped]" in done.stderr
    assert contents_sent(threaded_service)[2] == ["b", "b", "c" * 30]


def test_once(chat, threaded_service):
    done = chat("", "--once", "hello", "--system", "be brief", "--set", "temperature=0", "--set", "stop=x")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    start = threaded_service.starts[0]
    assert [(message.role, message.content) for message in start.chat.messages] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]
    assert start.sampling.HasField("temperature")
    assert list(start.sampling.stop) == ["x"]
    assert chat("from a pipe", "--once", "-").stdout == "from a pipe\n"


def test_lines_can_be_joined(chat):
    done = chat('one \\\ntwo\n"""\nthree\n  four\n"""\n')
    assert done.stdout == "one \ntwo\nthree\n  four\n"


def test_the_models_own_defaults_are_shown_unless_something_else_is_set(chat, threaded_service):
    threaded_service.sampling_defaults = pb.SamplingParams(temperature=0.6, top_k=20)
    done = chat("/set temperature=0.5\n/set\n")
    shown = "max_tokens = 1000\ntemperature = 0.5\ntop_k = 20 (the model's default)\n"
    assert done.stderr.endswith(shown)


def test_commands(chat, threaded_service):
    commands = [
        "/help",
        "/stats",
        "/set temperature=0.5",
        "/set",
        "/system be brief",
        "/system",
        "hello",
        "/stats",
        "/reset",
        "/system -",
        "/set temperature=",
        "/set",
        "again",
        "/exit",
        "never sent",
    ]
    done = chat("\n".join(commands))
    assert done.returncode == 0
    assert done.stdout == "hello\nagain\n"
    for text in ("/reset  ", "no answer yet", "max_tokens = 1000\ntemperature = 0.5\n", "be brief\n", "[new conv"):
        assert text in done.stderr
    assert "tokens/s, ended by stop; prompt of 5 tokens, 1 of them cached\nall: 1 answers, 5 tokens" in done.stderr
    first, second = threaded_service.starts
    assert [message.content for message in first.chat.messages] == ["be brief", "hello"]
    assert first.sampling.temperature == 0.5
    assert [message.content for message in second.chat.messages] == ["again"]
    assert not second.sampling.HasField("temperature")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/sett x=1", "unknown command /sett; /help shows the commands"),
        ("/set heat=1", "heat: unknown field"),
        ("/set temperature=hot", "temperature: expected a number, got 'hot'"),
        ("/set timeout_ms=soon", "timeout_ms: expected an integer, got 'soon'"),
        ("/set n=2", "n: a chat has one answer per turn, as text"),
        ("/set continue_from=x", "continue_from: a chat always continues from its own last answer"),
        ("fail INTERNAL", "INTERNAL: as you wish"),
    ],
)
def test_a_mistake_is_reported_and_the_chat_continues(chat, line, says):
    done = chat(f"{line}\nstill here\n")
    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert done.stdout == "still here\n"
    assert "Traceback" not in done.stderr


def test_a_timeout_is_an_option_too(chat, threaded_service):
    done = chat("/set timeout_ms=30000\nhello\n/set\n/set timeout_ms=\nagain\n")
    assert "timeout_ms = 30000" in done.stderr
    assert [start.timeout_ms for start in threaded_service.starts] == [30_000, 0]


def test_a_question_that_failed_is_forgotten(chat, threaded_service):
    chat("fail INTERNAL\nhello\n")
    assert [message.content for message in threaded_service.starts[1].chat.messages] == ["hello"]


def test_the_oldest_turns_are_dropped_with_a_note(chat, threaded_service):
    threaded_service.context_length = 100
    done = chat("a" * 30 + "\nb\n" + "c" * 30 + "\n", "--set", "max_tokens=40")
    assert "[the context is full: the oldest turn is dropped]" in done.stderr
    contents = [message.content for message in threaded_service.starts[2].chat.messages]
    assert contents == ["b", "b", "c" * 30]


def test_a_message_beyond_the_context_is_refused(chat, threaded_service):
    threaded_service.context_length = 50
    done = chat("a" * 60 + "\nshort\n")
    assert "this message makes a prompt of 66 tokens; the model's context of 50" in done.stderr
    assert done.stdout == "short\n"


def test_a_missing_service_is_reported_with_how_to_start_one(tool):
    done = tool.run("chat", "--target", "127.0.0.1:1", "--once", "hi")
    assert done.returncode == 1
    assert done.stderr.startswith("penstock chat: no service answers at 127.0.0.1:1: Connection refused\n")
    assert "penstock serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_nonexistent_host_is_reported(tool):
    done = tool.run("chat", "--target", "nosuchhost.invalid:1", "--once", "hi")
    assert done.returncode == 1
    assert done.stderr.startswith("penstock chat: no service answers at nosuchhost.invalid:1: ")
    assert "penstock serve" in done.stderr


@pytest.mark.parametrize("command", [("chat", "--once", "hi"), ("generate", "--input", "-", "--output", "-")])
def test_tls_to_a_plaintext_server_is_reported_with_the_flag_to_drop(tool, threaded_service, command):
    done = tool.run(*command, "--target", threaded_service.target, "--tls", text="")
    assert done.returncode == 1
    assert done.stderr == (
        f"penstock {command[0]}: no service answers at {threaded_service.target}: the server there does not use TLS; "
        "leave out --tls and the other TLS flags\n"
    )


@pytest.mark.parametrize("command", [("chat", "--once", "hi"), ("generate", "--input", "-", "--output", "-")])
def test_without_a_key_where_one_is_needed_the_flag_is_named(tool, threaded_service, command):
    threaded_service.key = "secret"
    done = tool.run(*command, "--target", threaded_service.target, text="")
    assert done.returncode == 1
    assert "UNAUTHENTICATED: no valid API key" in done.stderr
    assert done.stderr.endswith("pass the key with --api-key-file FILE or in $PENSTOCK_API_KEY\n")
    tool.environment["PENSTOCK_API_KEY"] = "secret"
    assert tool.run(*command, "--target", threaded_service.target, text="").returncode == 0


@pytest.mark.parametrize("flag", ["--tls-ca", "--tls-cert", "--tls-key", "--api-key-file"])
def test_a_file_that_is_not_there_is_named_with_its_flag(tool, flag):
    done = tool.run("chat", flag, "/nowhere/x", "--once", "hi")
    assert (done.returncode, done.stderr) == (
        1,
        f"penstock chat: {flag}: cannot read /nowhere/x: No such file or directory\n",
    )


def test_a_question_that_was_refused_is_no_answer(chat):
    done = chat("fail INTERNAL\n/stats\nhello\nfail INTERNAL\n/stats\n")
    assert "no answer yet" in done.stderr
    assert "all: 1 answers, 5 tokens" in done.stderr


def test_target_and_key_come_from_the_environment(tool, threaded_service, tmp_path):
    tool.environment |= {"PENSTOCK_TARGET": threaded_service.target, "PENSTOCK_API_KEY": "secret"}
    assert tool.run("chat", "--once", "hi").stdout == "hi\n"
    assert threaded_service.metadata["authorization"] == "Bearer secret"
    (tmp_path / "key").write_text("other\n")
    assert tool.run("chat", "--once", "hi", "--api-key-file", tmp_path / "key").returncode == 0
    assert threaded_service.metadata["authorization"] == "Bearer other"
    done = tool.run("chat", "--once", "hi", "--api-key-file", tmp_path / "none")
    assert done.returncode == 1
    assert "--api-key-file: cannot read" in done.stderr


def test_who_reads_may_leave(tool, threaded_service):
    process = tool.start("chat", "--target", threaded_service.target, "--once", "endless")
    assert process.stdout.read(7) == b"endless"
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.fixture
def terminal(open_terminal, threaded_service):
    return open_terminal("chat", "--target", threaded_service.target)


def test_on_a_terminal_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(terminal, threaded_service):
    terminal.wait_for("fake at 127.0.0.1:")
    terminal.wait_for("> ")
    threaded_service.keeps = True
    threaded_service.delay = 0.002
    terminal.type("endless\n")
    terminal.wait_for("endlessendless")
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("[cancelled]")
    terminal.wait_for("> ")
    wait_until(lambda: threaded_service.cancelled)
    assert threaded_service.cancelled == [threaded_service.starts[0].ref]
    terminal.interrupt("[press Ctrl-D to leave]")
    terminal.type("hello\n")
    terminal.wait_for("hello\r\nhello\r\n")
    terminal.wait_for("> ")
    messages = threaded_service.starts[1].chat.messages
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert messages[1].content.startswith("endlessendless")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_an_answer_cannot_command_the_terminal(terminal):
    terminal.wait_for("> ")
    terminal.type('"""\n')
    terminal.wait_for(". ")
    terminal.type("a\x16\x1b[31mb\n")  # Ctrl-V takes the escape as it is
    terminal.wait_for(". ")
    terminal.type('"""\n')
    terminal.wait_for('"""\r\n')
    assert "\x1b" not in terminal.wait_for("> ")
