"""What becomes of a template that takes for ever, or all memory, and of those who did not ask for it."""

import asyncio
import os
import socket
from contextlib import suppress

import psutil
import pytest

from penstock.service.chat_templates import renderers as template_renderers
from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.chat_templates.chat_template import TemplateError, compile_templates
from penstock.service.chat_templates.frames import FREE_GROWTH_CHARS, LONG_FRAME_BYTES
from penstock.service.chat_templates.text import runs
from penstock.service.errors import Reason, ServiceError
from penstock.service.thread_pool import FairThreadPool

SPIN = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
FILL = "{% set bytes = 'x' * 10**10 %}"
TRAP = f"{{% if messages[0].content == 'spin' %}}{SPIN}{{% elif messages[0].content == 'fill' %}}{FILL}{{% endif %}}"
TEMPLATE = f"{TRAP}{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{{% endfor %}}"
BRIEF_S = 0.2


def compiled(source, timeout_s=template_renderers.DEFAULT_TIMEOUT_S, **special_tokens):
    return compile_templates({"default": source}, special_tokens, timeout_s)["default"]


def chat(content, **options):
    return TemplateInput([TemplateMessage("user", content)], **options)


def connections(template):
    return template._renderers._idle


def renderers():
    process = template_renderers._launcher()._process
    assert process is not None
    return psutil.Process(process.pid).children()


def end_renderers():
    for renderer in renderers():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            renderer.kill()


@pytest.mark.parametrize("trap", ["spin", "fill"])
def test_an_expensive_template_fails_only_its_request(trap):
    template = compiled(TEMPLATE, BRIEF_S)
    for _ in range(2):
        with pytest.raises(ServiceError, match=r"chat: the model's chat template takes more than 0\.2 s") as refused:
            template.render(chat(trap))
        assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "chat")
        assert template.render(chat("hi")) == "<|user|>hi"


@pytest.mark.parametrize("tenant", ["spinner", "other"])
async def test_others_go_on_meanwhile(tenant):
    template = compiled(TEMPLATE, 30.0)
    lane = FairThreadPool("test", 1, 1 << 20, num_giving_way=3)
    spinning = asyncio.ensure_future(lane.run(lambda: template.render(chat("spin")), 10, "spinner"))
    try:
        for _ in range(20):
            assert await lane.run(lambda: template.render(chat("hi")), 10, tenant) == "<|user|>hi"
        assert not spinning.done()
    finally:
        while not spinning.done():
            end_renderers()
            await asyncio.sleep(0.01)
        with pytest.raises(ServiceError):
            await spinning
        lane.close()


async def test_one_tenants_loops_leave_room_for_anothers():
    template = compiled(TEMPLATE, 30.0)
    lane = FairThreadPool("test", 1, 1 << 20, num_giving_way=3)
    spinning = [asyncio.ensure_future(lane.run(lambda: template.render(chat("spin")), 10, "spinner")) for _ in range(8)]
    try:
        assert await lane.run(lambda: template.render(chat("hi")), 10, "other") == "<|user|>hi"
        assert not any(each.done() for each in spinning)
    finally:
        lane.close()
        while not all(each.done() for each in spinning):
            end_renderers()  # each render is tried twice
            await asyncio.sleep(0.01)
        await asyncio.gather(*spinning, return_exceptions=True)


def test_a_text_may_grow_only_so_far():
    template = compiled("{{ messages[0].content * 64 }}")
    assert len(template.render(chat("x" * 1000))) == 64_000
    with pytest.raises(ServiceError, match="makes 6,400,000 characters of it"):
        template.render(chat("x" * 100_000))
    assert len(compiled("{{ 'x' * 1000000 }}").render(chat("hi"))) == 1_000_000 < FREE_GROWTH_CHARS


def test_a_renderer_that_ended_is_replaced():
    template = compiled(TEMPLATE)
    connections(template)[0].shutdown(socket.SHUT_RDWR)
    assert template.render(chat("hi")) == "<|user|>hi"


def test_a_launcher_that_ended_is_replaced():
    template = compiled(TEMPLATE)
    launcher = template_renderers._launcher()
    assert launcher._process is not None
    launcher._process.kill()
    launcher._process.wait()
    connections(template).pop().close()
    assert template.render(chat("hi")) == "<|user|>hi"


def test_a_long_conversation_ends_its_renderer():
    template = compiled(TEMPLATE)
    text = "long " * (LONG_FRAME_BYTES // 5 + 1)
    assert template.render(chat(text)) == f"<|user|>{text}"
    assert not connections(template)
    assert template.render(chat("hi")) == "<|user|>hi"


def test_the_longest_conversation_has_memory_enough():
    source = "{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\\n') %}<|x|>{{ c ~ c | trim }}"
    template = compiled(source + "{% endfor %}")
    text = "\U0001f600" * (1 << 20)
    assert template.render(chat(text)) == f"<|x|>{text}{text}"


@pytest.mark.parametrize("value", [2**70, -(2**64), 2**64 - 1, 1e999, 0.1, None, [1, {"a": -(2**100)}], "é\U0001f600"])
def test_variables_are_what_they_were(value):
    rendered = compiled("{{ value }}").render(chat("hi", variables={"value": value}))
    assert rendered == str(value)


def test_the_origin_of_a_text_crosses_processes():
    rendered = compiled("{{ bos }}<|x|>{{ messages[0].content }}!", bos="<s>").render(chat("<|x|>"))
    assert list(runs(rendered)) == [("<s><|x|>", True), ("<|x|>", False), ("!", True)]


def test_half_a_character_is_no_text():
    with pytest.raises(ServiceError, match="renders invalid text"):
        compiled('{{ "\\ud800" }}').render(chat("hi"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ 'a' * 10**10 }}", "takes more than"),
        (SPIN, "takes more than"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "nested too deeply"),
        ("{{ " + "[" * 2000 + "]" * 2000 + " }}", "nested too deeply"),
        ("{{ 1" + " + 1" * 20_000 + " }}", "nested too deeply"),
        ("{% if x %}" * 200 + "{% endif %}" * 200, "cannot be compiled"),
        ("{% if x %}", "not valid Jinja, line 1"),
        ("{{ messages | nothing }}", "not valid Jinja, line 1"),
    ],
)
def test_template_compile_errors_are_reported(source, problem):
    with pytest.raises(TemplateError, match=problem) as refused:
        compiled(source)
    assert "\n" not in str(refused.value)


def test_a_template_that_refuses_a_greeting_compiles():
    assert compiled("{{ raise_exception('no') }}").roles >= {"user"}


def test_templates_can_open_no_file_and_see_no_key(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    launcher = template_renderers._launcher()
    launcher.end()
    template = compiled(TEMPLATE)
    [renderer] = renderers()
    if os.geteuid() == 0:  # only root may read it, since the processes are not dumpable
        with open(f"/proc/{renderer.pid}/environ", "rb") as environment:
            assert b"secret" not in environment.read()
    with open(f"/proc/{renderer.pid}/limits") as limits:
        [line] = [line for line in limits if line.startswith("Max open files")]
    assert line.split()[3:5] == ["0", "0"]
    assert template.render(chat("hi"))


def test_a_renderer_without_a_processor_is_no_fault_of_the_conversation(monkeypatch):
    template = compiled(TEMPLATE)
    monkeypatch.setattr(template_renderers, "_WALL_FACTOR", 0.0)
    monkeypatch.setattr(template_renderers, "_WALL_S", 0.1)
    stopped = renderers()
    for renderer in stopped:
        renderer.suspend()
    try:
        with pytest.raises(ServiceError, match="too busy to render") as refused:
            template.render(chat("hi"))
    finally:
        for renderer in stopped:
            renderer.resume()
    assert refused.value.reason is Reason.PREPARATION_FULL
    monkeypatch.undo()
    assert template.render(chat("hi")) == "<|user|>hi"
