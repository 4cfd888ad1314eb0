"""The options of every method: how it may be repeated, and where a proxy that transcodes JSON offers it."""

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.api import annotations_pb2, http_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

PROTOS = Path(__file__).parents[2] / "protos/penstock/v1"
MODULES = [importlib.import_module(f"penstock.v1.{path.stem}_pb2") for path in sorted(PROTOS.glob("*.proto"))]
METHODS: list[MethodDescriptor] = [
    method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
UNARY = [method for method in METHODS if not (method.client_streaming or method.server_streaming)]
VARIABLE = re.compile(r"\{(\w+)\}")
TEMPLATE = re.compile(r"/penstock/v1((?:/(?:[a-z]+|\{\w+\}))+)(?::([a-z][A-Za-z]*))?")


def names(methods: list[MethodDescriptor]) -> list[str]:
    return [f"{method.containing_service.name}.{method.name}" for method in methods]


def binding(method: MethodDescriptor) -> tuple[str, str, http_pb2.HttpRule]:
    """The verb, the template and the whole rule."""
    rule = method.GetOptions().Extensions[annotations_pb2.http]
    verb = rule.WhichOneof("pattern")
    assert verb is not None, "no google.api.http"
    return verb, getattr(rule, verb), rule


def query_fields(message: Descriptor, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """The fields of a request as the names of a query."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.file.package == "google.protobuf":
            yield path + field.name, field
        else:
            assert not field.is_repeated, f"{path}{field.name}: a query has no lists of messages"
            yield from query_fields(inner, f"{path}{field.name}.")


def test_there_are_methods() -> None:
    assert {"GenerationService.Complete", "AdminService.UpdateSettings"} <= set(names(UNARY))
    assert len(UNARY) < len(METHODS)


@pytest.mark.parametrize("method", METHODS, ids=names(METHODS))
def test_how_it_may_be_repeated_is_set(method: MethodDescriptor) -> None:
    options = method.GetOptions()
    assert options.HasField("idempotency_level"), "set idempotency_level, IDEMPOTENCY_UNKNOWN if it may not be repeated"
    reads = re.match("Get|List|Watch|Explain|Tokenize|Detokenize|Render|Describe", method.name) is not None
    assert (options.idempotency_level == MethodOptions.NO_SIDE_EFFECTS) is reads


@pytest.mark.parametrize("method", UNARY, ids=names(UNARY))
def test_its_binding_is_valid(method: MethodDescriptor) -> None:
    verb, template, rule = binding(method)
    matched = TEMPLATE.fullmatch(template)
    assert matched is not None, template
    fields = dict(query_fields(method.input_type)) if verb == "get" else method.input_type.fields_by_name
    for variable in VARIABLE.findall(template):
        assert fields[variable].type == FieldDescriptor.TYPE_STRING
    reads = method.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS
    assert verb in (("get", "post") if reads else ("post", "patch"))
    assert rule.body == ("" if verb == "get" else "*")
    assert not rule.additional_bindings
    # A custom verb is the method's own, as in POST .../requests:cancel of CancelRequests.
    if custom := matched[2]:
        assert method.name.lower().startswith(custom.lower())
    else:
        assert re.match("Get|List|Update", method.name)


def overlap(one: str, other: str) -> bool:
    """Whether a path may match both templates."""
    first, second = TEMPLATE.fullmatch(one), TEMPLATE.fullmatch(other)
    assert first is not None
    assert second is not None
    if first[2] != second[2]:
        return False
    segments, others = first[1].split("/"), second[1].split("/")
    return len(segments) == len(others) and all(
        a == b or a.startswith("{") or b.startswith("{") for a, b in zip(segments, others, strict=True)
    )


def test_no_two_bindings_overlap() -> None:
    bound = [(name, *binding(method)[:2]) for name, method in zip(names(UNARY), UNARY, strict=True)]
    assert not [
        (one[0], other[0])
        for one, other in itertools.combinations(bound, 2)
        if one[1] == other[1] and overlap(one[2], other[2])
    ]


def test_templates_that_overlap_are_found() -> None:
    assert overlap("/penstock/v1/models/{name}", "/penstock/v1/models/mine")
    assert overlap("/penstock/v1/requests/{id}:explain", "/penstock/v1/requests/{request_id}:explain")
    assert not overlap("/penstock/v1/requests/{id}:explain", "/penstock/v1/requests:cancel")
    assert not overlap("/penstock/v1/requests", "/penstock/v1/requests:cancel")
