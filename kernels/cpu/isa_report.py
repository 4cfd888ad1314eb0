"""Prints the instruction sets that this machine runs the CPU library with, the best first; or why it cannot be used,
and the remedy. ``penstock doctor`` runs it in a process of its own."""

import contextlib
import sys

from penstock.kernels.cpu.bindings import LEVELS, LibraryMissing, find_kernels


def main() -> None:
    """Ends with status 1, and the reason and the remedy on stderr, where the library is of no use."""
    try:
        found = [level for level in LEVELS if find_kernels(level)]
        with contextlib.suppress(ModuleNotFoundError):  # of numpy: the bare install serves nothing anyway
            from penstock.kernels.cpu.program import typed_library

            typed_library()
    except LibraryMissing as error:
        sys.exit(f"{error.what}\n{error.remedy}")
    sys.stdout.write("\n".join([*found, ""]))


if __name__ == "__main__":
    main()
