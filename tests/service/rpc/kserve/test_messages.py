"""The messages are Triton's, and a process may have both penstock's and another package's."""

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2

from penstock.v1 import kserve

TRITON = service_pb2.DESCRIPTOR.pool


def described(message):
    """The message as data, by field."""
    proto = descriptor_pb2.DescriptorProto()
    message.CopyToProto(proto)
    return {field.name: (field.number, field.type, field.label, field.type_name) for field in proto.field}


def messages_of(file):
    found = list(file.message_types_by_name.values())
    for message in found:
        found += message.nested_types
    return found


def test_every_message_and_method_has_tritons_names_and_numbers():
    file = kserve.POOL.FindFileContainingSymbol(kserve.SERVICE)
    assert kserve.POOL is not TRITON
    for message in messages_of(file):
        theirs = described(TRITON.FindMessageTypeByName(message.full_name))
        assert described(message).items() <= theirs.items(), message.full_name
    for enum in file.enum_types_by_name.values():
        theirs = TRITON.FindEnumTypeByName(enum.full_name).values_by_name
        assert all(theirs[value.name].number == value.number for value in enum.values)

    def shape(method):
        types = method.input_type.full_name, method.output_type.full_name
        return (*types, method.client_streaming, method.server_streaming)

    own, theirs = ({each.name: shape(each) for each in pool.FindServiceByName(kserve.SERVICE).methods}
                   for pool in (kserve.POOL, TRITON))  # fmt: skip
    assert own == theirs


def test_requests_have_all_of_tritons_fields():
    for name in ("ModelInferRequest", "ModelInferRequest.InferInputTensor", "InferParameter", "InferTensorContents"):
        full_name = f"inference.{name}"
        own, theirs = (pool.FindMessageTypeByName(full_name) for pool in (kserve.POOL, TRITON))
        assert described(own) == described(theirs)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_service(inference, version):
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    request = reflection_pb2.ServerReflectionRequest
    call = inference.service.channel.stream_stream(
        path, request.SerializeToString, reflection_pb2.ServerReflectionResponse.FromString
    )()
    await call.write(request(list_services=""))
    assert kserve.SERVICE in {each.name for each in (await call.read()).list_services_response.service}
    await call.write(request(file_containing_symbol=kserve.SERVICE))
    [raw] = (await call.read()).file_descriptor_response.file_descriptor_proto
    pool = descriptor_pool.DescriptorPool()
    pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
    assert len(pool.FindServiceByName(kserve.SERVICE).methods) == len(kserve.METHODS)
    await call.done_writing()


async def test_without_the_flag_there_is_no_such_service(start_inference):
    inference = await start_inference(contracts=())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await inference.call("ServerLive")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_has_the_name_of_the_service(inference):
    stub = health_pb2_grpc.HealthStub(inference.service.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=kserve.SERVICE))
    assert response.status == health_pb2.HealthCheckResponse.SERVING
