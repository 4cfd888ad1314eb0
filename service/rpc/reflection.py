"""Server reflection under both of its names: grpc.reflection.v1, and v1alpha for older tools.

The messages of the two have the same fields; grpcio-reflection has only those of v1alpha.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from penstock.v1 import orca

_V1ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_V1_FILE = "grpc/reflection/v1/reflection.proto"
_V1_SERVICE = f"{_V1}.ServerReflection"


def add_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Adds to ``server`` the reflection of ``services``, given by full name, and of reflection itself."""
    _add_v1_descriptor()
    names = (*services, reflection.SERVICE_NAME, _V1_SERVICE)
    servicer = reflection.aio.ReflectionServicer(names, pool=_ServedDescriptors())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    handlers = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_V1_SERVICE, handlers),))
    server.add_registered_method_handlers(_V1_SERVICE, handlers)


class _ServedDescriptors:
    """Combines protobuf's default pool and that of load reports, with the methods of a DescriptorPool that reflection
    uses."""

    def FindFileByName(self, name: str) -> Any:
        return self._first("FindFileByName", name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        return self._first("FindFileContainingSymbol", symbol)

    def FindMessageTypeByName(self, name: str) -> Any:
        return self._first("FindMessageTypeByName", name)

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return message.file.pool.FindAllExtensions(message)

    def _first(self, method: str, name: str) -> Any:
        """Returns the result of the first pool that knows the name. Raises KeyError."""
        try:
            return getattr(descriptor_pool.Default(), method)(name)
        except KeyError:
            return getattr(orca.POOL, method)(name)


def _add_v1_descriptor() -> None:
    """Adds v1's file, made from v1alpha's, to this process's descriptors: tools describe every listed service."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name, file.package = _V1_FILE, _V1
        for message in file.message_type:
            for field in message.field:
                if field.HasField("type_name"):
                    field.type_name = field.type_name.replace(_V1ALPHA, _V1)
        for service in file.service:
            for method in service.method:
                method.input_type = method.input_type.replace(_V1ALPHA, _V1)
                method.output_type = method.output_type.replace(_V1ALPHA, _V1)
        pool.AddSerializedFile(file.SerializeToString())
