"""Values of fields whose types are protobuf's own, just outside and just inside their bounds."""

from collections.abc import Iterator
from typing import Any

from google.protobuf import duration
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from penstock.service.config import field_rules as kinds
from penstock.service.config.limits import Nested


def bad_wire_values(bound: Any) -> Iterator[tuple[Any, str]]:
    """Values just outside a bound, each with what is added to the field's path. Any value of the last kinds is good."""
    match bound:
        case kinds.Span(low=low, high=high):
            yield duration.from_milliseconds(round(low * 1000) - 1), ""
            yield Duration(seconds=int(high), nanos=1), ""
            yield Duration(seconds=1, nanos=10**9), ""
            yield Duration(seconds=1, nanos=-1), ""
        case kinds.MaskPaths(high=high, names=names):
            yield FieldMask(paths=[names[0]] * (high + 1)), ".paths"
            yield FieldMask(paths=[names[0], "*", "etag"]), ".paths[2]"
            yield FieldMask(paths=["default_tenant.weight"]), ".paths[0]"
        case _:
            assert type(bound) in (kinds.Bound, Nested), f"no bad values for {bound}"


def good_wire_values(bound: Any) -> list[Any]:
    """The values at the ends of a bound."""
    match bound:
        case kinds.Span(low=low, high=high):
            return [duration.from_milliseconds(round(low * 1000)), Duration(seconds=int(high))]
        case kinds.MaskPaths(high=high, names=names):
            return [FieldMask(paths=[*names, "*"]), FieldMask(paths=[names[0]] * high), FieldMask()]
        case _:
            return []
