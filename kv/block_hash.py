"""Names blocks by what their KV depends on: the tokens from the start of the sequence, the model and the tenant.

A hash is sha256 over tagged, length-prefixed fields, so no two different lists of fields give the same bytes. Each
block's hash includes its parent's, so equal hashes mean equal histories. This module does not know blocks or pools.
"""

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = hashlib.sha256().digest_size
_TAG = b"penstock.kv.block.1"
_SALT_TAG = b"penstock.kv.salt.1"


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def tenant_salt(model: str, tenant: str, adapter: bytes = b"") -> bytes:
    """Returns 32 bytes that keep apart the cached blocks of two tenants, of two models or of two LoRA adapters.
    ``adapter`` is the digest of the adapter; empty: there is none."""
    fields = _field(_SALT_TAG) + _field(model.encode()) + _field(tenant.encode())
    return hashlib.sha256(fields + (_field(adapter) if adapter else b"")).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: bytes, parent: bytes = b"") -> list[bytes]:
    """Returns the hashes of the full blocks of ``token_ids``. Tokens after the last full block are ignored.

    ``parent`` is the hash of the block before the first one; empty at the start of a sequence.
    """
    num_full = len(token_ids) // block_size
    if not num_full:
        return []
    packed = memoryview(struct.pack(f"<{num_full * block_size}I", *token_ids[: num_full * block_size]))
    num_bytes = 4 * block_size
    tokens_prefix = num_bytes.to_bytes(8, "little")
    base = hashlib.sha256(_field(_TAG) + _field(salt))
    hashes = []
    for start in range(0, len(packed), num_bytes):
        block = base.copy()
        block.update(_field(parent) + tokens_prefix)
        block.update(packed[start : start + num_bytes])
        parent = block.digest()
        hashes.append(parent)
    return hashes


def hash_more_blocks(token_ids: Sequence[int], known: Sequence[bytes], block_size: int, salt: bytes) -> list[bytes]:
    """Returns the hashes of all full blocks of ``token_ids``; those of the first ones are ``known``."""
    rest = token_ids[len(known) * block_size :]
    return [*known, *hash_blocks(rest, block_size, salt, known[-1] if known else b"")]
