"""The LoRA adapters that requests may name as their model. Knows neither calls nor files."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from penstock.kv.block_hash import tenant_salt
from penstock.scheduler.adapters import Adapter
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.adapter_loader import AdapterError
from penstock.scheduler.loop.engine import Engine
from penstock.service.config.text_size import utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid

MAX_ADAPTERS = 999
"""The maximum number of adapters that are known at once: with the model, as many as a page of ListModels has."""
MAX_NAME_BYTES = 256
"""The contract's limit."""
_MAX_NAMED = 10
"""The maximum number of names in an error."""


class AdapterRegistry:
    """The adapters of one served model, by name."""

    def __init__(
        self,
        model_name: str,
        engine: Engine | None = None,
        permitted: Callable[[str], Collection[str] | None] = lambda tenant: None,
    ) -> None:
        """``engine`` is started; None: there can be no adapters. ``permitted`` returns the names of the adapters that a
        tenant may use; None: all."""
        self.model_name = model_name
        self._engine = engine
        self._permitted = permitted
        self._adapters: dict[str, Adapter] = {}
        self._loading: set[str] = set()

    def __contains__(self, name: object) -> bool:
        """Whether there is an adapter of this name, for any tenant."""
        return name in self._adapters

    def __iter__(self) -> Iterator[Adapter]:
        """Iterates over all adapters, by name."""
        return iter([adapter for _, adapter in sorted(self._adapters.items())])

    def of_tenant(self, tenant: str) -> list[Adapter]:
        """Returns the adapters that a tenant may use, by name."""
        names = self._permitted(tenant)
        return [adapter for adapter in self if names is None or adapter.name in names]

    def find(self, model: str, tenant: str) -> Adapter | None:
        """Returns the adapter that a tenant's request names as its model; None for the model itself. Raises
        ServiceError MODEL_NOT_FOUND with the names that it may use. The validator refuses a name that is too long."""
        if model in ("", self.model_name) or utf8_bytes(model) > MAX_NAME_BYTES:
            return None
        names = self._permitted(tenant)
        adapter = self._adapters.get(model)
        if adapter is not None and (names is None or model in names):
            return adapter
        known = [self.model_name, *(adapter.name for adapter in self.of_tenant(tenant)[:_MAX_NAMED])]
        message = f"model: no model of this name is served here; leave it empty, or send {', '.join(known)}"
        raise ServiceError(Reason.MODEL_NOT_FOUND, message, field="model")

    def resolve(self, model: str, tenant: str) -> tuple[Adapter | None, bytes]:
        """Returns the adapter that a tenant's request names, and the salt of its block hashes. Raises ServiceError."""
        adapter = self.find(model, tenant)
        return adapter, tenant_salt(self.model_name, tenant, b"" if adapter is None else adapter.digest)

    async def load(self, name: str, path: str) -> Adapter:
        """Loads an adapter; running requests go on. One that is loaded already stays, but its files must be the same.
        Raises ServiceError."""
        if self._engine is None or not len(self._engine.adapters.slots):
            raise invalid("name", "this service has no slots for adapters; start it with --max-loras")
        if name in ("", self.model_name):
            raise invalid("name", "is the model's own; choose another" if name else "is required")
        if name in self._loading:
            raise invalid("name", "an adapter of this name is being loaded; wait for it, or choose another")
        if not Path(path).is_absolute():
            raise invalid("path", "must be an absolute path on the service's host")
        known = self._adapters.get(name)
        if known is not None and known.path != path:
            raise invalid("name", "is the name of another adapter; unload that first, or choose another name")
        if known is None and len(self._adapters) + len(self._loading) >= MAX_ADAPTERS:
            raise invalid("name", f"at most {MAX_ADAPTERS:,} adapters may be loaded; unload another one first")
        self._loading.add(name)
        try:
            if known is not None:
                await self._engine.adapters.check_files(known)
                return known
            adapter = await self._engine.adapters.load(name, path)
        except AdapterError as error:
            raise invalid("path", str(error)) from None
        except ExecutorError:
            raise ServiceError(Reason.WORKER_DOWN) from None
        finally:
            self._loading.discard(name)
        self._adapters[name] = adapter
        return adapter

    async def load_all(self, paths: Mapping[str, str]) -> None:
        """Loads the adapters of the command line, by name. Raises ExecutorError with the flag's name."""
        for name, path in paths.items():
            try:
                await self.load(name, path)
            except ServiceError as error:
                raise ExecutorError(f"--lora-modules: {name}: {error.message}") from None

    def unload(self, name: str) -> Adapter:
        """Refuses new requests for an adapter, and returns it; requests that the engine has finish. Raises
        ServiceError."""
        adapter = self._adapters.pop(name, None)
        if adapter is None or self._engine is None:
            raise ServiceError(Reason.MODEL_NOT_FOUND, "name: no adapter of this name is loaded", field="name")
        self._engine.adapters.unload(adapter)
        return adapter
