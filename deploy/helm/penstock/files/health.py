"""An exec probe for pods with TLS, since Kubernetes' gRPC probes do not support TLS.

    health.py ADDRESS [SERVICE]

Calls grpc.health.v1 without TLS at ADDRESS, which is the admin listener on 127.0.0.1. The exit status is 0 if SERVICE
is SERVING, and 1 otherwise.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0


def main(address: str, service: str = "") -> int:
    """Returns the exit status."""
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {error}\n")
            return 1
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    sys.stdout.write(f"{name}\n")
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
