"""Any message at all: the translation accepts it, or refuses it with an error from the catalogue."""

import json
from typing import Any

from hypothesis import given, settings, strategies as st

import penstock.v1 as pb
from penstock.service.errors import ServiceError
from penstock.service.rpc.kserve.parameters import GENERATION_PARAMETERS
from penstock.service.rpc.kserve.request import INPUTS, OUTPUTS, fill_embedding, fill_generation, is_embedding
from penstock.v1.kserve import message_class

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted(GENERATION_PARAMETERS)) | st.text(max_size=8)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4).map(lambda value: json.dumps(value).encode())
ELEMENTS = (
    st.sampled_from([b"hi", b"\0", b"\1", b"\2\0\0\0hi", b"\xff\xff\xff\xffhi", b"\xc3"])
    | OBJECTS
    | st.binary(max_size=8)
)
PARAMETERS = st.one_of(
    st.fixed_dictionaries({"bool_param": st.booleans()}),
    st.fixed_dictionaries({"int64_param": st.integers(-(2**63), 2**63 - 1)}),
    st.fixed_dictionaries({"uint64_param": st.integers(0, 2**64 - 1)}),
    st.fixed_dictionaries({"double_param": st.floats()}),
    st.fixed_dictionaries({"string_param": st.text(st.characters(codec="utf-8"), max_size=8)}),
    st.just({}),
)
CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "bytes_contents": st.lists(ELEMENTS, max_size=2),
        "bool_contents": st.lists(st.booleans(), max_size=2),
        "fp32_contents": st.lists(st.floats(width=32), max_size=2),
    },
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
TENSORS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(sorted(INPUTS)) | TEXTS,
        "datatype": st.sampled_from(["BYTES", "BOOL"]) | TEXTS,
        "shape": st.just([1]) | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    },
    optional={"contents": CONTENTS, "parameters": st.dictionaries(TEXTS, PARAMETERS, max_size=1)},
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=3)},
    optional={
        "id": TEXTS,
        "model_name": TEXTS,
        "model_version": st.just("1") | TEXTS,
        "parameters": st.dictionaries(NAMES.filter(str.isascii), PARAMETERS, max_size=3),
        "outputs": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from([*OUTPUTS, "embedding"]) | TEXTS}), max_size=2
        ),
        "raw_input_contents": st.lists(ELEMENTS, max_size=3),
    },
)
WITH_PROMPT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"hi"]}}


def error_of(fields: dict[str, Any], may_stream: bool) -> ServiceError | None:
    """The error of a request that is refused. Any other exception is a bug."""
    request = message_class("ModelInferRequest")(**fields)
    try:
        if is_embedding(request, generates=True):
            fill_embedding(pb.EmbedRequest(), request)
        else:
            fill_generation(pb.GenerationStart(), request, may_stream=may_stream)
    except ServiceError as error:
        return error
    return None


def check(fields: dict[str, Any], may_stream: bool) -> None:
    error = error_of(fields, may_stream)
    assert error is None or error.message.startswith(f"{error.field}: "), "it names what is wrong"


@settings(deadline=None)
@given(fields=REQUESTS, may_stream=st.booleans())
def test_any_request_is_translated_or_refused(fields, may_stream):
    check(fields, may_stream)


@settings(deadline=None)
@given(
    parameters=st.dictionaries(st.sampled_from(sorted(GENERATION_PARAMETERS)), PARAMETERS, max_size=3), sampling=OBJECTS
)
def test_any_parameters_are_translated_or_refused(parameters, sampling):
    sampling_input = {**WITH_PROMPT, "name": "sampling_parameters", "contents": {"bytes_contents": [sampling]}}
    check({"inputs": [WITH_PROMPT, sampling_input], "parameters": parameters}, may_stream=True)
