"""Converts LoRA adapters to messages of AdminService."""

import penstock.v1 as pb
from penstock.scheduler.adapters import Adapter


def adapter_message(adapter: Adapter) -> pb.Adapter:
    """Returns the message for an adapter, as it is now."""
    slot = 0 if adapter.is_loading else adapter.slot
    return pb.Adapter(name=adapter.name, path=adapter.path, rank=adapter.rank, slot=slot, running_rows=adapter.num_rows)
