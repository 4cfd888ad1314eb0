"""A service of one's own: private, there when it is needed, gone whatever happens; and the library on top of it."""

import asyncio
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from penstock.clients import Client
from penstock.clients.errors import InvalidOption, PenstockError, RequestFailed
from penstock.service import llm as llm_module
from penstock.service.app.embedded import LocalServiceError, local_service
from penstock.service.llm import LLM

FLAGS = {"max_model_len": 256, "kv_cache_memory_bytes": "64M"}


def gone(pid):
    """Whether a process ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def llm():
    """The demo model as a library; when it is closed nothing of it is left."""
    others = set(psutil.Process().children(recursive=True))
    with LLM("demo", **FLAGS) as llm:
        directory = socket_of(llm.target).parent
        children = set(psutil.Process().children(recursive=True)) - others
        assert len(children) >= 2, "the service and its worker"
        yield llm
    assert not directory.exists()
    # Those that render templates end when they see that the service is gone.
    wait_until(lambda: all(gone(child.pid) for child in children))


def socket_of(target):
    return Path(target.removeprefix("unix:"))


def test_it_is_private(llm):
    socket = socket_of(llm.target)
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert {path.name for path in socket.parent.iterdir()} == {"log", "socket", "socket.lock"}, "nobody administers it"


def test_its_target_and_flags_are_for_any_client(llm):
    with Client(llm.target) as client:
        assert client.model().max_model_len == FLAGS["max_model_len"]


def test_its_directory_is_short_enough_for_a_socket(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(LocalServiceError, match="no such directory"), local_service("/nowhere"):
        pass


@pytest.mark.parametrize(
    ("model", "flags", "problem"),
    [
        ("/nowhere", {}, "^/nowhere: no such directory"),
        ("demo", {"max_num_seqs": 0}, "^--max-num-seqs: must be 1 to 4,096; it is 0"),
        ("demo", {"no_such": 1}, "^no such flag or argument: --no-such=1"),
        ("demo", {"port": 1}, "^--port: a private service has its own socket"),
        ("/nowhere", {"enable_prefix_caching": False, "threads": None}, "^/nowhere: no such directory"),
    ],
)
def test_what_is_wrong_is_one_line(model, flags, problem):
    with pytest.raises(LocalServiceError, match=problem) as caught, local_service(model, **flags):
        pass
    assert "\n" not in str(caught.value)


def test_it_ends_with_its_parent_however_that_ends():
    code = (
        "import psutil, sys, time\n"
        "from penstock.service.app.embedded import local_service\n"
        f"with local_service('demo', **{FLAGS}) as target:\n"
        "    print(target, *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    target, *words = parent.stdout.readline().split()
    pids = [int(word) for word in words]
    directory = socket_of(target).parent
    assert directory.exists()
    assert len(pids) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=120)
    wait_until(lambda: all(gone(pid) for pid in pids))
    assert not directory.exists()


def test_generate_answers_in_order(llm):
    prompts = ["The kernel is", "A package is", "The kernel is"]
    first, second, third = llm.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)
    assert first.choices[0].token_ids == third.choices[0].token_ids
    assert len(second.choices[0].token_ids) == 8
    with Client(llm.target) as client:
        assert llm.generate([client.tokenize(prompts[0])], max_tokens=8, temperature=0)[0].text == first.text
    (alone,) = llm.generate(prompts[0], max_tokens=8, temperature=0, ignore_eos=True)
    assert alone.text == first.text
    assert llm.generate([]) == []


def test_more_prompts_than_fit_in_a_step_are_all_answered(llm, capsys):
    answers = llm.generate([[number % 100] for number in range(300)], max_tokens=1, progress=True)
    assert len(answers) == 300
    assert "300/300" in capsys.readouterr().err


def test_chat_takes_one_conversation_or_several(llm):
    conversation = [{"role": "user", "content": "What does a kernel do?"}]
    (one,) = llm.chat(conversation, max_tokens=4, temperature=0, ignore_eos=True)
    several = llm.chat([conversation, conversation], max_tokens=4, temperature=0, ignore_eos=True)
    assert [answer.text for answer in several] == [one.text] * 2


async def test_it_works_where_a_loop_runs_already(llm):
    asyncio.get_running_loop()
    assert len(llm.generate(["a"], max_tokens=1)) == 1


def test_what_is_wrong_with_a_request_is_raised(llm):
    with pytest.raises(InvalidOption):
        llm.generate(["a"], temprature=1)
    with pytest.raises(RequestFailed, match="temperature"):
        llm.generate(["a", "b"], temperature=1000)


@contextmanager
def fake_service(model, **flags):
    yield "unix:/nowhere"
    print(f"ended {model} {flags}")


def test_a_closed_model_raises_a_clear_error(monkeypatch, capsys):
    monkeypatch.setattr(llm_module, "local_service", fake_service)
    llm = LLM("some", threads=1)
    llm.close()
    llm.close()
    assert capsys.readouterr().out == "ended some {'threads': 1}\n"
    with pytest.raises(PenstockError, match="the model is closed"):
        llm.generate(["a"])


def test_an_unclosed_model_ends_with_its_object(monkeypatch, capsys):
    monkeypatch.setattr(llm_module, "local_service", fake_service)
    LLM("some")
    assert capsys.readouterr().out == "ended some {}\n"
