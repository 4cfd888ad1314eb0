"""Describes the server and its model, for clients that ask before they send requests."""

from collections.abc import Mapping, Sequence
from typing import Any

import penstock.v1 as pb
from penstock.service.auth.identity import DEFAULT_TENANT, current_principal
from penstock.service.errors import ServiceError, StatusError, to_status
from penstock.service.rpc.foreign.contracts import ContractParts, renamed_status
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.rpc.kserve.request import (
    EMBEDDING,
    EMBEDDING_INPUTS,
    INPUTS,
    MODEL_VERSION,
    OUTPUTS,
    TEXT_INPUT,
    check_version,
)
from penstock.service.rpc.kserve.tensors import Datatype
from penstock.v1.kserve import message_class

SERVER_NAME = "penstock"
_EXTENSIONS = ("model_configuration",)
"""The extensions with methods that are not refused."""
_CONFIG_TYPES: Mapping[Datatype, str] = {
    Datatype.BOOL: "TYPE_BOOL",
    Datatype.BYTES: "TYPE_STRING",
    Datatype.FP32: "TYPE_FP32",
    Datatype.UINT32: "TYPE_UINT32",
}
"""The names of the types in a model's configuration."""
_READY, _UNAVAILABLE = "READY", "UNAVAILABLE"


class InferenceMetadata:
    """Builds the responses for one service. Requests are messages of the contract."""

    def __init__(self, parts: ContractParts) -> None:
        self._parts = parts
        self._inputs = INPUTS if parts.generates else EMBEDDING_INPUTS
        self._outputs: Mapping[str, tuple[Datatype, Sequence[int]]] = (
            OUTPUTS if parts.generates else {EMBEDDING: (Datatype.FP32, [1, parts.facts.hidden_size])}
        )

    def server_live(self) -> Any:
        """Returns a ServerLiveResponse: the process answers."""
        return message_class("ServerLiveResponse")(live=True)

    def server_ready(self) -> Any:
        """Returns a ServerReadyResponse: whether requests are accepted."""
        return message_class("ServerReadyResponse")(ready=self._parts.health.is_ready)

    def model_ready(self, request: Any) -> Any:
        """Returns a ModelReadyResponse; an unknown model is not ready. The caller needs no credentials, so only the
        adapters that everyone may use are known."""
        is_known = request.name in self._names(DEFAULT_TENANT) and request.version in ("", MODEL_VERSION)
        return message_class("ModelReadyResponse")(ready=is_known and self._parts.health.is_ready)

    def server_metadata(self) -> Any:
        """Returns a ServerMetadataResponse."""
        metadata = message_class("ServerMetadataResponse")
        return metadata(name=SERVER_NAME, version=self._parts.version, extensions=_EXTENSIONS)

    def model_metadata(self, request: Any) -> Any:
        """Returns a ModelMetadataResponse. Raises ServiceError and StatusError for an unknown model."""
        self._check_model(request)
        response = message_class("ModelMetadataResponse")(
            name=request.name or self._parts.model_name, versions=[MODEL_VERSION], platform=SERVER_NAME
        )
        for name, datatype in self._inputs.items():
            response.inputs.add(name=name, datatype=datatype.value, shape=[1])
        for name, (datatype, shape) in self._outputs.items():
            response.outputs.add(name=name, datatype=datatype.value, shape=shape)
        return response

    def model_config(self, request: Any) -> Any:
        """Returns a ModelConfigResponse. Raises ServiceError and StatusError for an unknown model."""
        self._check_model(request)
        response = message_class("ModelConfigResponse")()
        config = response.config
        config.name, config.backend = request.name or self._parts.model_name, SERVER_NAME
        config.model_transaction_policy.decoupled = self._parts.generates
        for name, datatype in self._inputs.items():
            config.input.add(name=name, data_type=_CONFIG_TYPES[datatype], dims=[1], optional=name != TEXT_INPUT)
        for name, (datatype, shape) in self._outputs.items():
            config.output.add(name=name, data_type=_CONFIG_TYPES[datatype], dims=shape)
        return response

    def repository_index(self, request: Any) -> Any:
        """Returns a RepositoryIndexResponse with the model and the adapters that the caller's tenant may use, unless
        only ready ones are wanted and they are not."""
        response = message_class("RepositoryIndexResponse")()
        is_ready = self._parts.health.is_ready
        if not request.repository_name and (is_ready or not request.ready):
            for name in self._names(current_principal.get().tenant):
                model = response.models.add(name=name, version=MODEL_VERSION)
                model.state = _READY if is_ready else _UNAVAILABLE
                model.reason = "" if is_ready else self._parts.engine.state.name.lower()
        return response

    def _names(self, tenant: str) -> list[str]:
        """Returns the names that a tenant may give as a model."""
        return [self._parts.model_name, *(adapter.name for adapter in self._parts.adapters.of_tenant(tenant))]

    def _check_model(self, request: Any) -> None:
        check_version("version", request.version)
        try:
            self._parts.validator.check(pb.GetModelRequest(model=request.name))
            self._parts.adapters.find(request.name, current_principal.get().tenant)
        except ServiceError as error:
            raise StatusError(renamed_status(to_status(error, current_request_id.get()), {"model": "name"})) from None
