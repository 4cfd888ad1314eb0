"""Reads the fields that the tools have in common, and refuses what is not supported."""

import re
from collections.abc import Callable, Iterable

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.checkpoint.quantization.module_patterns import MAX_CHARS, ModulePatterns

GROUP_STEP = 32
"""The number of columns in a group is a multiple of this."""
MAX_GROUP = 1 << 20

ANOTHER = "use another quantised checkpoint, or the unquantised one with --quantization int8 or int4"


def require(holds: bool, fields: HfConfigReader, name: str, rule: str) -> None:
    """Raises ModelError, naming the field, unless the rule holds."""
    if not holds:
        raise fields.wrong(name, f"{rule}: {ANOTHER}")


def check_bits(fields: HfConfigReader, name: str, bits: int) -> None:
    """Raises ModelError, naming the field, if it is another number."""
    require(fields.integer(name, 1, 64) == bits, fields, name, f"must be {bits}")


def read_group_size(fields: HfConfigReader, default: int | None = None) -> int:
    """Returns the value of ``group_size``, with 0 for -1: all columns of a row share a scale."""
    size = fields.integer("group_size", -1, MAX_GROUP, default)
    fits = size == -1 or (size > 0 and size % GROUP_STEP == 0)
    require(fits, fields, "group_size", f"must be -1 or a multiple of {GROUP_STEP}")
    return max(size, 0)


def read_block(fields: HfConfigReader, name: str) -> tuple[int, int]:
    """Returns how many rows and how many columns share a scale."""
    sizes = fields.integers(name, 1, MAX_GROUP)
    fits = len(sizes) == 2 and sizes[1] % GROUP_STEP == 0
    require(fits, fields, name, f"must be rows and columns, the latter a multiple of {GROUP_STEP}")
    return sizes[0], sizes[1]


def read_patterns(
    fields: HfConfigReader, name: str, translate: Callable[[str], str] = lambda text: text
) -> ModulePatterns:
    """Returns the patterns in a list; ``translate`` turns each into compressed-tensors' notation. Raises ModelError."""
    return patterns_of(fields, name, map(translate, fields.texts(name)))


def patterns_of(fields: HfConfigReader, name: str, texts: Iterable[str]) -> ModulePatterns:
    """Returns the patterns in compressed-tensors' notation. Raises ModelError, naming the field that has them."""
    try:
        return ModulePatterns(texts)
    except re.error as error:
        raise fields.wrong(name, f"has a pattern that cannot be read ({error}): correct it") from error


def read_skipped_modules(fields: HfConfigReader, name: str = "modules_to_not_convert") -> ModulePatterns:
    """Returns patterns of modules, each given as part of a dotted name."""
    parts = fields.texts(name) if name in fields else []
    if any(len(part) > MAX_CHARS // 4 for part in parts):
        raise fields.wrong(name, f"must name modules in at most {MAX_CHARS // 4} characters each")
    return ModulePatterns(f"re:(.*\\.)?{re.escape(part.strip('.'))}(\\.|$)" for part in parts)
