"""Speeds up Triton's interpreter, which runs kernels on a CPU, by caching work that it repeats for every launch."""

from functools import cache
from typing import Any

from triton.runtime import interpreter


@cache
def patch_language_once() -> None:
    """Makes the interpreter patch Triton's language once per kernel and leave it patched. By itself it does so for each
    launch and for each call of a function in a kernel, which takes longer than the kernels' own work."""
    patch = interpreter._patch_lang  # noqa: SLF001

    @cache
    def patch_and_leave(function: Any) -> Any:
        patch(function)
        # An empty scope restores nothing.
        return interpreter._LangPatchScope()  # noqa: SLF001

    interpreter._patch_lang = patch_and_leave  # noqa: SLF001
