"""Makes Triton's interpreter compute in half the time."""

import functools
import sys
from dataclasses import replace
from typing import Any


def make_interpreter_fast() -> None:
    """Turns off the interpreter's checks for overflow, which take a quarter of the time, and caches its lookup of
    dtypes, which builds a table of all dtypes each time. Affects the whole process. Does nothing unless a test that was
    collected has imported the interpreter."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    import triton.language as tl

    find = interpreter._get_np_dtype
    find_once = functools.cache(find)

    def find_fast(dtype: Any) -> Any:
        # Types of pointers and blocks cannot be hashed.
        return find_once(dtype.scalar) if type(dtype.scalar) is tl.dtype else find(dtype)

    interpreter._get_np_dtype = find_fast
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
