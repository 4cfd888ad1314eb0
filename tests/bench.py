"""Runs the benchmarks of tests/bench one after another, each in a process of its own, and prints what they print.

    make bench                              all of them
    make bench ARGS='scheduler_cost'        one of them
    make bench ARGS='hostile --classes heads'   one of them with its own options; --help after its name lists them
    make bench ARGS='--list'                their names, and what each measures

A figure is only as good as the quiet around it: run nothing else meanwhile. Fails if a benchmark does, never because
of a figure.
"""

import argparse
import ast
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "bench"


def main() -> int:
    """Runs the benchmarks that the command line names; returns the exit status."""
    scripts = {path.stem: path for path in sorted(FOLDER.glob("*/*.py"))}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run; default: all")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and end")
    names, options = _split(sys.argv[1:])
    arguments = parser.parse_args(names or options)
    unknown = [name for name in arguments.names if name not in scripts]
    if unknown:
        parser.error(f"no benchmark named {unknown[0]}; there are: {', '.join(scripts)}")
    if arguments.list:
        for folder, paths in itertools.groupby(scripts.values(), lambda path: path.parent.name):
            print(f"{folder}:", *(f"  {path.stem:20} {_summary(path)}" for path in paths), sep="\n")
        return 0
    if names and options and len(names) > 1:
        parser.error(f"{options[0]} is an option of one benchmark; name only that one")
    failed = [name for name in arguments.names or scripts if not _run(name, scripts[name], options if names else ())]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Names before the first option, and what follows: the options of the benchmark that is named, or else our own."""
    number = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    return argv[:number], argv[number:]


def _summary(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _run(name: str, path: Path, options: Sequence[str] = ()) -> bool:
    print(f"== {name}: {_summary(path)}", flush=True)
    start = time.monotonic()
    # -P keeps the folder off sys.path, where a benchmark's name could hide a module's.
    status = subprocess.run([sys.executable, "-P", path, *options], check=False).returncode
    print(f"== {name}: {'done' if status == 0 else f'failed with status {status}'}", end="")
    print(f" in {time.monotonic() - start:.0f} s\n", flush=True)
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
