"""LangChain's and LlamaIndex's clients of OpenAI, as they come, complete streamed chats."""

from typing import Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAI
from pydantic import SecretStr

SAID = "Ein Käfer, 東京 and 🙂."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def langchain(scripted):
    return ChatOpenAI(base_url=f"{scripted}/v1", api_key=SecretStr("none"), model="gpt-4o", max_retries=0, timeout=None)


def test_langchain_streams(langchain):
    whole = AIMessageChunk(content="")
    for part in langchain.stream([("system", "Be brief."), ("human", f"SAY {SAID}")], stream_usage=True):
        whole += part
    assert whole.content == SAID
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(SAID.encode()) + 1


async def test_langchain_streams_asynchronously(langchain):
    parts = [part.content async for part in langchain.astream(f"SAY {SAID}")]
    assert len(parts) > 3
    assert "".join(parts) == SAID


def test_langchain_calls_tools(langchain):
    def weather(city: str) -> str:
        """Tells a city's weather."""
        return city

    whole = AIMessageChunk(content="")
    for part in langchain.bind_tools([weather]).stream(f"SAY {CALL}"):
        whole += part
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Köln"})
    assert whole.response_metadata["finish_reason"] == "tool_calls"


def test_langchain_calls_tools_of_the_demo_model(demo):
    """Served without any flag: a call that must come, and a conversation with its result."""
    model = ChatOpenAI(base_url=f"{demo.http}/v1", api_key=SecretStr("none"), model="demo", max_retries=0, timeout=None)

    def weather(city: Literal["Köln", "Bonn"]) -> str:
        """Tells a city's weather."""
        return city

    history = [HumanMessage("Is it raining?")]
    answer = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke(history)
    [call] = answer.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Köln", "Bonn")
    result = ToolMessage("It is.", tool_call_id=call["id"])
    last = model.bind_tools([weather], tool_choice="none", max_tokens=16).invoke([*history, answer, result])
    assert not last.tool_calls


@pytest.fixture
def llama_index(scripted):
    return OpenAI(api_base=f"{scripted}/v1", api_key="none", model="gpt-4o", max_retries=0, timeout=3600.0)


def test_llama_index_streams(llama_index):
    parts = list(llama_index.stream_chat([ChatMessage(role="user", content=f"SAY {SAID}")]))
    assert len(parts) > 3
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content == SAID


async def test_llama_index_streams_asynchronously(llama_index):
    stream = await llama_index.astream_chat([ChatMessage(role="user", content=f"SAY {SAID}")])
    assert "".join([part.delta or "" async for part in stream]) == SAID
