"""Makes Triton's interpreter compute in half the time, and treat NaN as a GPU does. Both changes affect the whole
process. Neither is made unless a test that was collected has imported the interpreter."""

import functools
import sys
from dataclasses import replace
from typing import Any

import numpy as np

FP8_NAN = 0x7F


def make_interpreter_fast() -> None:
    """Turns off the interpreter's checks for overflow, which take a quarter of the time, and caches its lookup of
    dtypes, which builds a table of all dtypes each time."""
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


def treat_nan_as_gpus_do() -> None:
    """Has minima, maxima and clamps drop NaN unless they are asked to propagate it, and conversions to fp8 keep it.
    numpy always propagates it, and the interpreter's own conversion makes an ordinary number of it."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    convert = builder.create_fp_to_fp

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan == tl.PropagateNan.ALL:
            return self.ternary_op(x, low, high, np.clip)
        return self.ternary_op(x, low, high, lambda x, low, high: np.fmin(np.fmax(x, low), high))

    def convert_nan(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        made = convert(self, source, dtype, rounding)
        if dtype.scalar == tl.float8e4nv and source.data.dtype.kind == "f":
            made.data = np.where(np.isnan(source.data), np.uint8(FP8_NAN), made.data)
        return made

    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    builder.create_clampf = clamp
    builder.create_fp_to_fp = convert_nan
