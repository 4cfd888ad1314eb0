"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from pydantic import Field

from penstock.clients.gateway.schemas.common import Body


class LoadLoraRequest(Body):
    """A request to load a LoRA adapter."""

    lora_name: str = Field(description="The adapter's name for requests.")
    lora_path: str = Field(description="The directory of its files: an absolute path on the service's host.")


class UnloadLoraRequest(Body):
    """A request to unload a LoRA adapter."""

    lora_name: str = Field(description="The adapter's name for requests.")
    lora_int_id: int | None = Field(None, description="Ignored: adapters are known by name.")
