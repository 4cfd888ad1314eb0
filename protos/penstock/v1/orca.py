"""The messages of load reports (ORCA), built from the descriptors in ``orca.binpb``, which `make protos` writes.

They have a descriptor pool of their own: the package xds-protos adds files of the same names to protobuf's default
pool, and a process may import both. Penstock does not depend on that package because it overwrites files of
googleapis-common-protos and of opentelemetry-proto.
"""

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

TRAILER = "endpoint-load-metrics-bin"
"""The name of the trailing metadata with a serialized OrcaLoadReport (gRFC A51)."""
SERVICE = "xds.service.orca.v3.OpenRcaService"

POOL = descriptor_pool.DescriptorPool()
"""The descriptors of the messages and of the service."""
for _file in descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("orca.binpb").read_bytes()).file:
    POOL.Add(_file)

OrcaLoadReport: Any = GetMessageClass(POOL.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport"))
OrcaLoadReportRequest: Any = GetMessageClass(POOL.FindMessageTypeByName("xds.service.orca.v3.OrcaLoadReportRequest"))
