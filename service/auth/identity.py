"""Maps API keys and tokens to tenants, and lists who may call each method. Methods that are not listed are denied.

A key file has one line per key: ``sha256:<hex> <tenant> [act-for-others] [admin]``; blank lines and comments after
``#`` are ignored. Keys are long and random, so no slower hash is needed. No file, log or message contains a key itself.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, TypeAlias

import grpc

from penstock.clients.host.reloaded_files import FileError, NamedFile
from penstock.service.config.limits import TENANT_NAME
from penstock.service.errors import Reason, ServiceError, invalid

DEFAULT_TENANT = "default"
ACT_FOR_OTHERS, ADMIN = "act-for-others", "admin"
"""The rights that a key or a token may have."""
API_KEYS_FLAG = "--api-keys-file"
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_KEY_BYTES = 1024
_REMEDY = """echo "sha256:$(printf %s "$KEY" | sha256sum | cut -c-64) some-tenant" makes a line"""

Metadata = Sequence[tuple[str, str | bytes]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def cache_salt(tenant: str) -> str | None:
    """Returns the salt with which routers, which hash tokens themselves, keep the same tokens of two tenants separate.
    Callers without credentials, and blocks that were stored without a tenant, have none."""
    return tenant if tenant not in ("", DEFAULT_TENANT) else None


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a method."""

    tenant: str
    may_act_for_others: bool = False
    may_administer: bool = False

    def tenant_for(self, named: str) -> str:
        """Returns the tenant of a request that names the tenant ``named`` (empty: none). Raises ServiceError
        TENANT_DENIED, and INVALID_FIELD for an invalid name."""
        if named in ("", self.tenant):
            return self.tenant
        if not TENANT_NAME.fullmatch(named):
            raise invalid("tenant", "must be 1 to 64 letters, digits, '_', '.' and '-'")
        if not self.may_act_for_others:
            raise ServiceError(Reason.TENANT_DENIED, field="tenant")
        return named


class Authenticator(Protocol):
    """Identifies callers by a call's metadata."""

    def authenticate(self, metadata: Metadata) -> Principal:
        """Returns the caller. Raises ServiceError UNAUTHENTICATED."""
        ...


class AllowAll:
    """Without keys and tokens all callers are one tenant, and none may act for another. All callers of the admin
    listener may administer: it is then local to this machine."""

    _CALLER = Principal(DEFAULT_TENANT, may_administer=True)

    def authenticate(self, metadata: Metadata) -> Principal:
        return self._CALLER


class ApiKeys:
    """The API keys, stored as hashes."""

    def __init__(self, callers: Mapping[bytes, Principal]) -> None:
        """``callers`` by the sha256 digests of their keys."""
        # The dictionary is keyed by a keyed hash of the digest, with a secret of this process, so that the time of a
        # look-up reveals nothing about the digests. The comparison after it takes the same time for every key.
        self._secret = secrets.token_bytes(32)
        self._callers = {self._blind(digest): (digest, principal) for digest, principal in callers.items()}
        self._nobody = (bytes(32), Principal(DEFAULT_TENANT))

    @classmethod
    def parse(cls, file: NamedFile, content: bytes) -> "ApiKeys":
        """Parses a key file. Raises FileError, which names the line and never a key."""
        callers: dict[bytes, Principal] = {}
        for number, line in enumerate(file.text(content).splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            digest, principal = _parse_line(words, f"{file}:{number}")
            if digest in callers:
                raise FileError(f"{file}:{number}: the key is in the file already; remove one of the lines")
            callers[digest] = principal
        if not callers:
            raise FileError(f"{file}: holds no key; leave the flag out, or add a line: {_REMEDY}")
        return cls(callers)

    def principal_of(self, credential: str) -> Principal | None:
        """See ``Credentials``."""
        if len(credential) > _MAX_KEY_BYTES:
            return None
        digest = hashlib.sha256(credential.encode()).digest()
        known, principal = self._callers.get(self._blind(digest), self._nobody)
        return principal if hmac.compare_digest(known, digest) else None

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


class Credentials(Protocol):
    """One kind of bearer credentials."""

    def principal_of(self, credential: str) -> Principal | None:
        """Returns the owner of a credential; None if it is not of this kind. Raises ServiceError UNAUTHENTICATED if it
        is of this kind and invalid."""
        ...


class BearerAuthenticator:
    """Accepts several kinds of bearer credentials."""

    def __init__(self, kinds: Sequence[Callable[[], Credentials]]) -> None:
        """``kinds`` are tried in order. Each is a function, since its file may have changed before a call."""
        self._kinds = kinds

    def authenticate(self, metadata: Metadata) -> Principal:
        """Requires one header ``authorization: Bearer <key or token>``."""
        credential = bearer_of(metadata)
        for kind in self._kinds:
            principal = kind().principal_of(credential)
            if principal is not None:
                return principal
        raise ServiceError(Reason.UNAUTHENTICATED)


def bearer_of(metadata: Metadata) -> str:
    """Returns the credential after ``Bearer`` in the header ``authorization``. Raises ServiceError UNAUTHENTICATED if
    there is none, or more than one such header."""
    values = [value for name, value in metadata if name == "authorization"]
    if len(values) == 1 and isinstance(values[0], str):
        scheme, _, credential = values[0].partition(" ")
        if scheme.lower() == "bearer" and credential:
            return credential
    raise ServiceError(Reason.UNAUTHENTICATED)


class Access(Enum):
    """The callers that a method is open to."""

    OPEN = auto()
    """Anyone: for probes, reflection and balancers, which have no credentials."""
    CALLERS = auto()
    """Authenticated callers."""
    ADMINS = auto()
    """Authenticated callers that may administer."""


ACCESS: Mapping[str, Access] = {
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/Watch": Access.OPEN,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Access.OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.OPEN,
    "/inference.GRPCInferenceService/CudaSharedMemoryRegister": Access.CALLERS,
    "/inference.GRPCInferenceService/CudaSharedMemoryStatus": Access.CALLERS,
    "/inference.GRPCInferenceService/CudaSharedMemoryUnregister": Access.CALLERS,
    "/inference.GRPCInferenceService/LogSettings": Access.CALLERS,
    "/inference.GRPCInferenceService/ModelConfig": Access.CALLERS,
    "/inference.GRPCInferenceService/ModelInfer": Access.CALLERS,
    "/inference.GRPCInferenceService/ModelMetadata": Access.CALLERS,
    "/inference.GRPCInferenceService/ModelReady": Access.OPEN,
    "/inference.GRPCInferenceService/ModelStatistics": Access.CALLERS,
    "/inference.GRPCInferenceService/ModelStreamInfer": Access.CALLERS,
    "/inference.GRPCInferenceService/RepositoryIndex": Access.CALLERS,
    "/inference.GRPCInferenceService/RepositoryModelLoad": Access.CALLERS,
    "/inference.GRPCInferenceService/RepositoryModelUnload": Access.CALLERS,
    "/inference.GRPCInferenceService/ServerLive": Access.OPEN,
    "/inference.GRPCInferenceService/ServerMetadata": Access.CALLERS,
    "/inference.GRPCInferenceService/ServerReady": Access.OPEN,
    "/inference.GRPCInferenceService/SystemSharedMemoryRegister": Access.CALLERS,
    "/inference.GRPCInferenceService/SystemSharedMemoryStatus": Access.CALLERS,
    "/inference.GRPCInferenceService/SystemSharedMemoryUnregister": Access.CALLERS,
    "/inference.GRPCInferenceService/TraceSetting": Access.CALLERS,
    "/openengine.v1.Control/Abort": Access.CALLERS,
    "/openengine.v1.Control/GetKvEventSources": Access.ADMINS,
    "/openengine.v1.Control/GetLoad": Access.CALLERS,
    "/openengine.v1.Control/GetModelInfo": Access.CALLERS,
    "/openengine.v1.Control/GetServerInfo": Access.CALLERS,
    "/openengine.v1.Control/Health": Access.OPEN,
    "/openengine.v1.Control/ListLoras": Access.ADMINS,
    "/openengine.v1.Control/LoadLora": Access.ADMINS,
    "/openengine.v1.Control/SubscribeKvEvents": Access.ADMINS,
    "/openengine.v1.Control/UnloadLora": Access.ADMINS,
    "/openengine.v1.Inference/Generate": Access.CALLERS,
    "/penstock.v1.AdminService/CancelRequests": Access.ADMINS,
    "/penstock.v1.AdminService/Drain": Access.ADMINS,
    "/penstock.v1.AdminService/Explain": Access.ADMINS,
    "/penstock.v1.AdminService/FlushCache": Access.ADMINS,
    "/penstock.v1.AdminService/GetSettings": Access.ADMINS,
    "/penstock.v1.AdminService/ListAdapters": Access.ADMINS,
    "/penstock.v1.AdminService/ListRequests": Access.ADMINS,
    "/penstock.v1.AdminService/LoadAdapter": Access.ADMINS,
    "/penstock.v1.AdminService/Resume": Access.ADMINS,
    "/penstock.v1.AdminService/UnloadAdapter": Access.ADMINS,
    "/penstock.v1.AdminService/UpdateSettings": Access.ADMINS,
    "/penstock.v1.AdminService/WatchKvEvents": Access.ADMINS,
    "/penstock.v1.AdminService/WatchStats": Access.ADMINS,
    "/penstock.v1.ClassificationService/Classify": Access.CALLERS,
    "/penstock.v1.ClassificationService/Score": Access.CALLERS,
    "/penstock.v1.EmbeddingService/Embed": Access.CALLERS,
    "/penstock.v1.GenerationService/Complete": Access.CALLERS,
    "/penstock.v1.GenerationService/Generate": Access.CALLERS,
    "/penstock.v1.GenerationService/GenerateOne": Access.CALLERS,
    "/penstock.v1.GenerationService/Prefetch": Access.CALLERS,
    "/penstock.v1.GenerationService/Release": Access.CALLERS,
    "/penstock.v1.ModelService/GetModel": Access.CALLERS,
    "/penstock.v1.ModelService/ListModels": Access.CALLERS,
    "/penstock.v1.TokenizerService/DescribeTokens": Access.CALLERS,
    "/penstock.v1.TokenizerService/Detokenize": Access.CALLERS,
    "/penstock.v1.TokenizerService/RenderChat": Access.CALLERS,
    "/penstock.v1.TokenizerService/Tokenize": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/Abort": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/Embed": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/FlushCache": Access.ADMINS,
    "/vllm.grpc.engine.VllmEngine/Generate": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/GetLoads": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": Access.CALLERS,
    "/vllm.grpc.engine.VllmEngine/HealthCheck": Access.OPEN,
    "/vllm.grpc.engine.VllmEngine/StartProfile": Access.ADMINS,
    "/vllm.grpc.engine.VllmEngine/StopProfile": Access.ADMINS,
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents": Access.ADMINS,
    "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics": Access.OPEN,
}
"""Every method that can be served; those of other engines' contracts only with ``--contracts``. Methods that are not
listed are denied to all callers."""

current_principal: ContextVar[Principal] = ContextVar("current_principal")
"""The caller of the method that the current task serves."""


class IdentityInterceptor(grpc.aio.ServerInterceptor):
    """Refuses callers before their message is read."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the method's own handler, or one that ends the call without reading its message."""
        handler = await continuation(handler_call_details)
        access = ACCESS.get(handler_call_details.method)
        if handler is None or access is Access.OPEN:
            return handler
        try:
            if access is None:
                raise ServiceError(Reason.METHOD_DENIED)
            principal = self._authenticator.authenticate(handler_call_details.invocation_metadata)
            if access is Access.ADMINS and not principal.may_administer:
                raise ServiceError(Reason.ADMIN_DENIED)
            current_principal.set(principal)
        except ServiceError as error:
            return _denial(error)
        return handler


def _denial(error: ServiceError) -> Handler:
    # A stream handler, whatever the method's type: with a unary one, gRPC would first receive and parse the message.
    async def deny(request_iterator: Any, context: Any) -> None:
        raise error

    return grpc.stream_stream_rpc_method_handler(deny)


def _parse_line(words: Iterable[str], where: str) -> tuple[bytes, Principal]:
    hashed, *rest = words
    match = _HASHED.fullmatch(hashed)
    if match is None:
        raise FileError(f"{where}: the first word must be 'sha256:' and 64 small hex digits; {_REMEDY}")
    if not rest or not TENANT_NAME.fullmatch(rest[0]):
        raise FileError(f"{where}: the second word must be a tenant, 1 to 64 characters of [A-Za-z0-9_.-]")
    tenant, *rights = rest
    if len(set(rights)) < len(rights) or not set(rights) <= {ACT_FOR_OTHERS, ADMIN}:
        raise FileError(f"{where}: after the tenant only '{ACT_FOR_OTHERS}' and '{ADMIN}' may follow, each once")
    return bytes.fromhex(match[1]), Principal(tenant, ACT_FOR_OTHERS in rights, ADMIN in rights)
