"""A Python that has only what a machine with a GPU and without a package index has: torch, triton and transformers
with what these need, and the wheels of `make gpu-wheels`. Other packages are hidden from imports."""

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
IN_THE_IMAGE = ("torch", "triton", "transformers", "pip", "setuptools")
OURS = "penstock-llm"

# Python runs it at its start, where PYTHONPATH leads to it. A module that is hidden is not found, as if it were not
# there, and not an error: some packages ask whether another one can be found.
SITECUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}

class WithoutHidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutHidden
"""


def write_sitecustomize(folder: Path) -> set[str]:
    """Has every Python whose PYTHONPATH begins with the folder hide packages. Returns the names of hidden modules."""
    hidden = hidden_modules()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(hidden=hidden))
    return hidden


def hidden_modules() -> set[str]:
    """Returns the installed modules that such a machine lacks."""
    installed: dict[str, Distribution] = {canonicalize_name(each.metadata["Name"]): each for each in distributions()}
    there = {OURS} | _with_requirements(IN_THE_IMAGE, installed) | set(gpu_wheels())
    lacking, kept = set[str](), set[str]()
    for name, distribution in installed.items():
        (kept if name in there else lacking).update(_modules(distribution))
    return lacking - kept


def gpu_wheels() -> list[str]:
    """Returns the packages that `make gpu-wheels` downloads."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [names] = re.findall(r"^GPU_WHEELS := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    return [canonicalize_name(name) for name in names.replace("\\\n", " ").split()]


def _with_requirements(names: Iterable[str], installed: dict[str, Distribution]) -> set[str]:
    found, open_names = set[str](), [canonicalize_name(name) for name in names]
    while open_names:
        name = open_names.pop()
        if name in found or name not in installed:
            continue
        found.add(name)
        for line in installed[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                open_names.append(canonicalize_name(requirement.name))
    return found


def _modules(distribution: Distribution) -> set[str]:
    """Returns the names of its modules and packages, down to the second level, since namespaces are shared."""
    found = set[str]()
    for file in distribution.files or ():
        if file.suffix in (".py", ".so") and ".." not in file.parts:
            parts = (*file.parts[:-1], file.name.partition(".")[0])
            found |= {".".join(parts[:depth]) for depth in (1, 2) if len(parts) >= depth}
    return {name.removesuffix(".__init__") for name in found}
