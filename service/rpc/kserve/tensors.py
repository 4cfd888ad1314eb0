"""Reads the input tensors of a request, and builds the output tensors of a response.

Each input has one element: a text or a bool. Outputs are in raw_output_contents, which all clients read; tritonclient
reads numbers only there.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from penstock.clients.cli.command_parser import nearest
from penstock.service.errors import ServiceError, invalid

_LENGTH_BYTES = 4
"""The size of the number before the bytes of each element of type BYTES."""
_SHAPES = ([1], [1, 1])
"""The shapes of one element. Clients of batched models add a dimension."""
_MAX_DIMS = 8
"""How many dimensions of a shape an error repeats."""
_MAX_SHOWN = 64
"""How many characters of a caller's name an error repeats."""
_TEXT_CODEC = "str"
"""MLServer's clients name their codec in the parameter ``content_type`` of a tensor."""


class Datatype(Enum):
    """The types of elements, as requests name them."""

    BOOL = "BOOL"
    BYTES = "BYTES"
    FP32 = "FP32"
    UINT32 = "UINT32"


_CONTENTS: Mapping[Datatype, str] = {Datatype.BOOL: "bool_contents", Datatype.BYTES: "bytes_contents"}
"""The field of InferTensorContents for each type of input."""
_FORMATS: Mapping[Datatype, str] = {Datatype.FP32: "f", Datatype.UINT32: "I"}
"""The format of each type of number, for struct."""


def read_inputs(request: Any, kinds: Mapping[str, Datatype]) -> dict[str, str | bool]:
    """Returns the elements of a ModelInferRequest's inputs by name. ``kinds`` are the known inputs. Raises
    ServiceError."""
    found: dict[str, str | bool] = {}
    raws = request.raw_input_contents
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in kinds:
            raise unknown("inputs", "input", name, kinds)
        if name in found:
            raise invalid(name, "is there twice; send it once")
        if raws and index >= len(raws):
            break
        found[name] = _element(tensor, kinds[name], raws[index] if raws else None)
    if raws and len(raws) != len(request.inputs):
        raise invalid(
            "raw_input_contents",
            f"must have one item for each of the {len(request.inputs):,} inputs, or none; it has {len(raws):,}",
        )
    return found


def _element(tensor: Any, datatype: Datatype, raw: bytes | None) -> str | bool:
    name = tensor.name
    if tensor.datatype != datatype.value:
        raise invalid(name, f"must have the datatype {datatype.value}; it has {shown(tensor.datatype)}")
    shape = list(tensor.shape[:_MAX_DIMS])  # there may be millions
    if shape not in _SHAPES:
        given = f"{shape}{'...' if len(tensor.shape) > _MAX_DIMS else ''}"
        raise invalid(name, f"must have the shape [1], one element; it has {given}")
    _check_parameters(tensor, datatype)
    if raw is None:
        element = _of_contents(tensor, datatype)
    elif tensor.HasField("contents"):
        raise invalid(name, "must be in contents or in raw_input_contents, not in both")
    else:
        element = _of_raw(name, datatype, raw)
    if not isinstance(element, bytes):
        return element
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, f"must be UTF-8; the byte at {error.start:,} is not") from None


def _check_parameters(tensor: Any, datatype: Datatype) -> None:
    for key in tensor.parameters:
        if key.startswith("shared_memory_"):
            raise invalid(tensor.name, "shared memory is not supported; send the element in the request")
        is_codec = key == "content_type" and datatype is Datatype.BYTES
        if not is_codec or tensor.parameters[key].string_param != _TEXT_CODEC:
            raise invalid(tensor.name, f"the parameter {shown(key)} of this input is not supported; omit it")


def _of_contents(tensor: Any, datatype: Datatype) -> bytes | bool:
    field = _CONTENTS[datatype]
    given = {descriptor.name: values for descriptor, values in tensor.contents.ListFields()}
    elements = given.pop(field, ())
    if given:
        raise invalid(tensor.name, f"must be in {field}; it has {', '.join(given)}")
    if len(elements) != 1:
        raise invalid(tensor.name, f"must have one element in {field}, as in its shape; it has {len(elements):,}")
    element: bytes | bool = elements[0]
    return element


def _of_raw(name: str, datatype: Datatype, raw: bytes) -> bytes | bool:
    if datatype is Datatype.BOOL:
        if raw not in (b"\0", b"\1"):
            raise invalid(name, f"must be one byte in raw_input_contents, 0 or 1; it has {len(raw):,} bytes")
        return raw == b"\1"
    if len(raw) < _LENGTH_BYTES:
        raise invalid(name, f"must begin with its length in 4 bytes in raw_input_contents; it has {len(raw):,} bytes")
    length, given = int.from_bytes(raw[:_LENGTH_BYTES], "little"), len(raw) - _LENGTH_BYTES
    if length != given:
        raise invalid(
            name,
            f"must have one element in raw_input_contents; its length is {length:,}, and {given:,} bytes follow",
        )
    return raw[_LENGTH_BYTES:]


def add_output(response: Any, name: str, datatype: Datatype, shape: Sequence[int]) -> None:
    """Adds a tensor to a ModelInferResponse, without its elements. These follow in raw_output_contents."""
    response.outputs.add(name=name, datatype=datatype.value, shape=shape)


def raw_texts(texts: Iterable[str]) -> bytes:
    """Returns the elements of an output of type BYTES."""
    encoded = [text.encode() for text in texts]
    return b"".join([part for text in encoded for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text)])


def raw_numbers(datatype: Datatype, numbers: Sequence[float]) -> bytes:
    """Returns the elements of an output of type FP32 or UINT32."""
    return struct.pack(f"<{len(numbers)}{_FORMATS[datatype]}", *numbers)


def unknown(field: str, what: str, name: str, known: Iterable[str]) -> ServiceError:
    """Returns the error for an unknown name in ``field``, with the known one that resembles it."""
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"there is {', '.join(known)}"
    return invalid(field, f"there is no {what} {shown(name)}; {hint}")


def shown(text: str) -> str:
    """Returns a caller's text for an error."""
    return ascii(text[:_MAX_SHOWN])
