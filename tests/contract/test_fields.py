"""Conventions of every field: how times are written, and what a debug print of a message may not show."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

PROTOS = Path(__file__).parents[2] / "protos/penstock/v1"
FILES = sorted(path.stem for path in PROTOS.glob("*.proto"))
TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

IDS_AND_NAMES = {
    "client_request_id",
    "continue_from",
    "etag",
    "for_request_id",
    "forget_tenants",
    "hash",
    "idempotency_key",
    "model",
    "next_page_token",
    "page_token",
    "parent_hash",
    "removed_hashes",
    "request_id",
    "request_ids",
    "resume_ticket",
    "session_id",
    "stream_id",
    "tenant",
    "ticket",
    "traceparent",
    "unknown_request_ids",
}
"""Text that identifies something: the service logs it, or could."""
HARMLESS = {
    # What is served.
    "Adapter.name",
    "Adapter.path",
    "ClassifyResponse.labels",
    "Injected.append_ids",
    "KvBlock.adapter",
    "LoadAdapterRequest.name",
    "LoadAdapterRequest.path",
    "Model.architecture",
    "Model.backend",
    "Model.dtype",
    "Model.eos_token_ids",
    "Model.features",
    "Model.kv_cache_dtype",
    "Model.labels",
    "Model.name",
    "Model.parent",
    "Model.quantization",
    "Model.reasoning_parser",
    "Model.speculation",
    "Model.tool_call_parser",
    "Model.version",
    "UnloadAdapterRequest.name",
    # Numbers that are no tokens, and roles.
    "ChatMessage.role",
    "DetokenizeResponse.text_offsets",
    "GenerationCancel.refs",
    "Logprobs.text_lengths",
    "Speculation.accepted_at",
    "Speculation.drafted_at",
    "TokenizeResponse.text_offsets",
    # Sets of tokens that a caller allows or ends with, as any caller might.
    "SamplingParams.allowed_token_ids",
    "SamplingParams.stop_token_ids",
}
"""Other text and lists of ids that contain no prompt and no output."""


def messages(file: str) -> Iterator[Descriptor]:
    def visit(message: Descriptor) -> Iterator[Descriptor]:
        if not message.GetOptions().map_entry:
            yield message
        for inner in message.nested_types:
            yield from visit(inner)

    for message in importlib.import_module(f"penstock.v1.{file}_pb2").DESCRIPTOR.message_types_by_name.values():
        yield from visit(message)


def fields(file: str) -> Iterator[FieldDescriptor]:
    for message in messages(file):
        yield from message.fields


def name_of(field: FieldDescriptor) -> str:
    return field.full_name.removeprefix("penstock.v1.")


def may_have_text(field: FieldDescriptor) -> bool:
    """Whether a field has text or a list of ids."""
    return field.type in TEXT or (field.type == FieldDescriptor.TYPE_UINT32 and field.is_repeated)


def is_harmless(field: FieldDescriptor) -> bool:
    return name_of(field) in HARMLESS or (field.type in TEXT and field.name in IDS_AND_NAMES)


@pytest.mark.parametrize("file", FILES)
def test_fields_with_prompts_and_outputs_are_redacted(file: str) -> None:
    missing = [
        name_of(field)
        for field in fields(file)
        if may_have_text(field) and not field.GetOptions().debug_redact and not is_harmless(field)
    ]
    assert not missing, f"add [debug_redact = true], or add them to HARMLESS: {', '.join(missing)}"


def test_nothing_is_redacted_that_is_listed_as_harmless() -> None:
    known = {name_of(field): field for file in FILES for field in fields(file)}
    assert known.keys() >= HARMLESS
    assert {field.name for field in known.values()} >= IDS_AND_NAMES
    assert not [name for name, field in known.items() if field.GetOptions().debug_redact and is_harmless(field)]


UNIT = re.compile(r"_(ns|us|ms|s|sec|secs|seconds|millis|micros|minutes|unix)(_\w+)?$")
HOT_FILES = {"generation", "generation_request", "output"}
"""Messages of every request and step, which have no messages for times."""


@pytest.mark.parametrize("file", FILES)
def test_times_are_durations_or_have_one_suffix(file: str) -> None:
    """`_ms` in the messages of every request, google.protobuf.Duration and Timestamp elsewhere."""
    units = [(name_of(field), match[1]) for field in fields(file) if (match := UNIT.search(field.name))]
    assert [name for name, unit in units if file not in HOT_FILES or unit != "ms"] == []


def test_timestamps_and_durations_are_named_for_what_they_are() -> None:
    """As in AIP-142: `..._time` for a moment, and for nothing else."""
    types = {
        name_of(field): field.message_type.full_name
        for file in FILES
        for field in fields(file)
        if field.message_type is not None and field.message_type.file.package == "google.protobuf"
    }
    moments = {name for name, type_name in types.items() if type_name == "google.protobuf.Timestamp"}
    assert moments == {name for name in types if name.endswith("_time")}
    assert "ExplainResponse.arrive_time" in moments
