"""The layout: folders that a reader can survey, and imports that have a direction."""

import ast
import functools
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("clients", "kernels", "kv", "models", "scheduler", "service")
MOST_FILES = 15
LARGE = {"models/train_demo"}
"""Folders with more files: the scripts that made the demo model."""

MOST_LINES, MOST_LINES_OF_FUNCTION = 400, 60
LONG_FUNCTIONS = {
    "kernels/cuda/attention/common.py": {"attend"},
    "kernels/cuda/attention/decode.py": {"decode_kernel"},
    "kernels/cuda/attention/prefill.py": {"prefill_kernel"},
    "kernels/cuda/moe/routing.py": {"route_kernel"},
    "kernels/cuda/rope_kv.py": {"_rope_kv"},
    "kernels/cuda/sampling/logits.py": {"process_logits"},
}
"""Triton kernels, which have a line for each argument."""


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """The trees of all files have millions of nodes, which the garbage collector would scan again and again."""
    gc.disable()
    yield
    gc.enable()


def sources() -> list[Path]:
    files = (file.relative_to(ROOT) for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    return sorted(file for file in files if not file.name.startswith("_") or file.name == "__init__.py")


def files_of_tests() -> list[Path]:
    return sorted(file.relative_to(ROOT) for file in (ROOT / "tests").rglob("*.py"))


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def module_of(file: Path) -> str:
    return ".".join(("penstock", *file.with_suffix("").parts)).removesuffix(".__init__")


def imports(file: Path, modules: set[str]) -> set[str]:
    """The modules of ours that a file imports when it runs, at once or later."""
    found = set()
    for node in nodes_that_run(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{each.name}" for each in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & modules


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """A tree's nodes without what only type checkers read."""
    nodes = [node]
    while nodes:
        yield (node := nodes.pop())
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """A way from a node back to itself; empty if there is none."""
    done: set[str] = set()

    def search(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        done.add(node)
        return next(filter(None, (search(after, [*way, node]) for after in sorted(edges.get(node, ())))), [])

    return next(filter(None, (search(node, []) for node in sorted(edges))), [])


@functools.cache
def file_edges() -> dict[str, set[str]]:
    files = {module_of(file): file for file in sources()}
    return {module: imports(file, set(files)) - {module} for module, file in files.items()}


def test_no_folder_has_more_files_than_a_reader_can_survey():
    files = [file for file in sources() + files_of_tests() if file.name != "__init__.py"]
    counts = Counter(file.parent.as_posix() for file in files)
    assert {folder for folder, number in counts.items() if number > MOST_FILES} == LARGE


def test_files_import_each_other_in_no_circle():
    assert circle(file_edges()) == []


def test_folders_import_each_other_in_no_circle():
    """A file that stands in a room itself, such as ``service/errors.py``, counts as a folder."""
    packages = {module_of(file) for file in sources() if file.name == "__init__.py"}

    def folder(module: str) -> str:
        parent = module if module in packages else module.rpartition(".")[0]
        return module if parent.count(".") == 1 else parent

    edges = defaultdict[str, set[str]](set)
    for module, imported in file_edges().items():
        edges[folder(module)] |= {folder(each) for each in imported} - {folder(module)}
    assert circle(edges) == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == ["b", "d", "b"]


def test_every_folder_has_a_docstring():
    inits = [file for file in sources() if file.name == "__init__.py"]
    assert [file for file in inits if not ast.get_docstring(parsed(file))] == []
    folders = {file.parent for file in sources()}
    without = {folder for folder in folders if not (ROOT / folder / "__init__.py").exists()}
    assert {folder.as_posix() for folder in without} <= {"models/train_demo"}


def test_every_class_has_a_name_of_its_own():
    files: defaultdict[str, list[str]] = defaultdict(list)
    for file in sources():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(file.as_posix())
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_files_are_short():
    files = sources() + files_of_tests()
    lengths = {file.as_posix(): (ROOT / file).read_text(encoding="utf-8").count("\n") for file in files}
    assert {file: length for file, length in lengths.items() if length > MOST_LINES} == {}


def test_functions_are_short():
    long_functions = defaultdict[str, set[str]](set)
    for file in sources():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MOST_LINES_OF_FUNCTION:
                    long_functions[file.as_posix()].add(node.name)
    assert long_functions == LONG_FUNCTIONS
