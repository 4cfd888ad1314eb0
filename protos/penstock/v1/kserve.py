"""The messages of the Open Inference Protocol v2 (KServe, Triton), built from the descriptors in ``kserve.binpb``,
which `make protos` writes.

They have a descriptor pool of their own: tritonclient, the package kserve and others each add messages of these names
to protobuf's default pool, from files that differ, and a process may import one of them. Penstock does not depend on
such a package: the stubs of tritonclient import its client, and with it numpy, ml-dtypes and rapidjson.
"""

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

SERVICE = "inference.GRPCInferenceService"

POOL = descriptor_pool.DescriptorPool()
"""The descriptors of the messages and of the service."""
for _file in descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("kserve.binpb").read_bytes()).file:
    POOL.Add(_file)

METHODS: tuple[MethodDescriptor, ...] = tuple(POOL.FindServiceByName(SERVICE).methods)


def message_class(name: str) -> Any:
    """Returns the class of the message with this name, without the package."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
ModelStreamInferResponse = message_class("ModelStreamInferResponse")
