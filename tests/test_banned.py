"""Nothing in this tree unpickles, or runs code that came with a model: model files are data.

An import ban that is a failing test. ruff has the same ban (TID251), and can be silenced by a comment; this cannot.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Modules whose loading runs what the bytes say, or that carry objects by pickling them.
MODULES = {
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "multiprocessing",
    "pickle",
    "shelve",
    "torch.multiprocessing",
    "torch.package",
    "torch.serialization",
}
# Functions that unpickle or carry pickles, by the module that they are taken from.
FUNCTIONS = {
    "torch": {"load", "save"},
    "torch.hub": {"load", "load_state_dict_from_url"},
    "torch.jit": {"load"},
    "torch.distributed": {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    },
    "yaml": {"full_load", "full_load_all", "load", "load_all", "unsafe_load", "unsafe_load_all"},
}
# Functions that import what their first argument names.
IMPORTERS = {"__import__", "import_module", "importorskip"}
# Arguments that turn on what is off by default.
ARGUMENTS = {"allow_pickle", "trust_remote_code"}
# A source without any of these words has no violation: whatever is banned has to be imported from somewhere.
WORDS = ARGUMENTS | {name.split(".", maxsplit=1)[0] for name in (*MODULES, *FUNCTIONS)}


def is_banned(full_name: str) -> bool:
    """Whether a dotted name is a banned module, lies in one, or is a banned function."""
    parts = full_name.split(".")
    holders = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return bool(holders & MODULES) or parts[-1] in FUNCTIONS.get(".".join(parts[:-1]), ())


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str, str]]:
    """Line, what is imported, the name that it binds, and what that name stands for: `import a.b` binds a."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".", maxsplit=1)[0]
                yield node.lineno, alias.name, alias.asname or first, alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full, alias.asname or alias.name, full


def dotted(node: ast.AST | None, bound: dict[str, str]) -> str:
    """The full name of `a.b.c`, through the file's imports; a string's own text; "" for anything else."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, bound)):
        return f"{base}.{node.attr}"
    return ""


def turned_on(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ARGUMENTS and not off:
            yield keyword.arg


def violations(source: str, filename: str = "<source>") -> Iterator[str]:
    """Every place in a Python source that imports a banned module, or names a banned function or argument."""
    if not any(word in source for word in WORDS):
        return
    nodes = list(ast.walk(ast.parse(source, filename)))
    imported = list(imports(nodes))
    found = [(line, full) for line, full, _, _ in imported if is_banned(full)]
    bound = {name: meaning for _, _, name, meaning in imported}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_banned(full := dotted(node, bound)):
            found.append((node.lineno, full))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in IMPORTERS and node.args and is_banned(full := dotted(node.args[0], bound)):
                found.append((node.lineno, full))
            found += [(node.lineno, f"{argument} turned on") for argument in turned_on(node)]
    for line, what in sorted(found):
        yield f"{filename}:{line}: {what}"


def python_files() -> list[Path]:
    """Every Python file of the tree; not those of an environment (hidden, or with pyvenv.cfg) or of node."""

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                made = path.name in {"node_modules", "build", "dist"} or (path / "pyvenv.cfg").exists()
                if not (made or path.name.startswith(".") or path.is_symlink()):
                    yield from walk(path)
            elif path.suffix in {".py", ".pyi"}:
                yield path

    return list(walk(ROOT))


def test_reliability_rule_1_nothing_unpickles() -> None:
    files = python_files()
    assert ROOT / "service/__init__.py" in files
    assert Path(__file__) in files
    found = [line for file in files for line in violations(file.read_text(), str(file.relative_to(ROOT)))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "def f():\n    import dill",
        "import cloudpickle",
        "import marshal",
        "import multiprocessing.shared_memory",
        "import torch\ntorch.load('x')",
        "import torch as t\nf = t.load",
        "from torch import load as read",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "from torch import distributed\ndistributed.gather_object(1)",
        "import torch.multiprocessing",
        "from torch import multiprocessing",
        "import torch\ntorch.serialization.load('x')",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('marshal')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load(text, Loader)",
        "AutoModel.from_pretrained('x', trust_remote_code=flag)",
    ],
)
def test_the_walk_finds(source: str) -> None:
    assert list(violations(source)) != []


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.load(file)",
        "import torch\ntorch.ones(1).tolist()",
        "from safetensors.torch import load_file\nload_file('x')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "from .pickle import jar",
        "import yaml\nyaml.safe_load(text)",
        "AutoModel.from_pretrained('x', trust_remote_code=False)",
        "text = 'import pickle'",
    ],
)
def test_the_walk_ignores_safe_code(source: str) -> None:
    assert list(violations(source)) == []
