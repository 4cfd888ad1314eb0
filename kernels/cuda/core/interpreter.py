"""Triton's interpreter, which runs kernels on a CPU, without what it does again and again."""

from functools import cache
from typing import Any

from triton.runtime import interpreter


@cache
def patch_language_once() -> None:
    """Has the interpreter put its own functions in the place of the language's once for each kernel, and leave them
    there. It does so for each launch, and for each call of a function in a kernel, which takes longer than all that
    kernels compute here."""
    patch = interpreter._patch_lang  # noqa: SLF001

    @cache
    def patch_and_leave(function: Any) -> Any:
        patch(function)
        # A scope in which nothing was changed has nothing to restore.
        return interpreter._LangPatchScope()  # noqa: SLF001

    interpreter._patch_lang = patch_and_leave  # noqa: SLF001
