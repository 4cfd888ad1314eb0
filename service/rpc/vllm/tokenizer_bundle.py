"""The tokenizer's files as a zip, for gateways that tokenize and render conversations themselves."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import common_pb2 as common

from penstock.service.rpc.foreign.contracts import ModelFiles
from penstock.service.text.tokenizer import Tokenizer

CHUNK_BYTES = 64 << 10
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "config.json", "generation_config.json",
)  # fmt: skip
_TEMPLATE = "chat_template.jinja"
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
"""The same for all files: equal files make an equal zip, whose hash a gateway may already know."""


class TokenizerBundle:
    """The zip of one model's tokenizer. Created when it is first needed."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer) -> None:
        self._files = files
        self._tokenizer = tokenizer
        self._chunks: list[common.GetTokenizerChunk] = []
        self._lock = asyncio.Lock()

    async def chunks(self) -> Sequence[common.GetTokenizerChunk]:
        """Returns the chunks of the zip; the last one has its SHA-256."""
        async with self._lock:
            if not self._chunks:
                self._chunks = await asyncio.to_thread(lambda: [*_chunks(self._make())])
        return self._chunks

    def _make(self) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in _FILES:
                # The folder of a converted tokenizer.json has no other file.
                paths = (self._files.tokenizer / name, self._files.model / name)
                path = next((each for each in paths if each.is_file()), None)
                if path is not None:
                    _add(archive, name, path.read_bytes())
            template = self._template()
            if template is not None:
                _add(archive, _TEMPLATE, template.encode())
        return buffer.getvalue()

    def _template(self) -> str | None:
        """Returns the only chat template. None if there is none, or if there is a second one for tools: then both are
        in the tokenizer's configuration."""
        if not self._tokenizer.has_chat_template:
            return None
        plain, with_tools = (self._tokenizer.chat_template(with_tools) for with_tools in (False, True))
        return plain.source if plain is with_tools else None


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, _TIMESTAMP)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


def _chunks(content: bytes) -> Iterator[common.GetTokenizerChunk]:
    digest = hashlib.sha256(content).hexdigest()
    for start in range(0, len(content), CHUNK_BYTES):
        is_last = start + CHUNK_BYTES >= len(content)
        yield common.GetTokenizerChunk(data=content[start : start + CHUNK_BYTES], sha256=digest if is_last else "")
