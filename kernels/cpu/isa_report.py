"""Prints the instruction sets with which this machine can run the CPU library, the default one first, or else why
the library cannot be used, and the remedy. ``penstock doctor`` runs this in a separate process."""

import contextlib
import sys

from penstock.kernels.cpu.bindings import LEVELS, LibraryMissing, find_kernels


def main() -> None:
    """Exits with status 1 and prints the reason and the remedy on stderr if the library cannot be used."""
    try:
        found = [level for level in LEVELS if find_kernels(level)]
        default = find_kernels()
        found.sort(key=lambda level: default is None or level != default.name.decode())
        with contextlib.suppress(ModuleNotFoundError):  # no numpy in the client-only installation, which cannot serve
            from penstock.kernels.cpu.program import typed_library

            typed_library()
    except LibraryMissing as error:
        sys.exit(f"{error.what}\n{error.remedy}")
    sys.stdout.write("\n".join([*found, ""]))


if __name__ == "__main__":
    main()
