"""CONTRIBUTING.md and the site of docs/: the files and verbs that they name exist, the navigation has every page, and
nothing on the site comes from another host."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MADE = (".venv/", "build/")
"""What a verb makes, so that a new clone lacks it."""
PATH = re.compile(r"\.?[\w./-]*/[\w./-]*|[\w-]+\.(?:md|toml|txt)")
"""A file or a folder, as code in the text names it."""


def named_paths(page: str) -> list[str]:
    """The files and folders that a page names, without what verbs make."""
    words = [word for code in re.findall(r"`([^`\n]+)`", page) for word in code.split()]
    return [word for word in words if PATH.fullmatch(word) and not word.startswith(MADE)]


def test_every_file_and_folder_that_is_named_exists() -> None:
    paths = named_paths(CONTRIBUTING)
    assert len(set(paths)) > 100
    assert sorted({path for path in paths if not (ROOT / path).exists()}) == []


def test_paths_are_found_among_other_code() -> None:
    page = "`kv/gone.py` and `make docs`, `pyproject.toml`, `.ci/run`; `.venv/bin/pytest tests/no -x`, `tests/`, `a.b`"
    assert named_paths(page) == ["kv/gone.py", "pyproject.toml", ".ci/run", "tests/no", "tests/"]


def test_every_verb_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"(?:`|^ {4})make (?:-\w+ )*([a-z-]+)", CONTRIBUTING, re.MULTILINE))
    assert {"setup", "test", "check", "check-fast", "docs", "protos"} <= verbs
    assert [verb for verb in verbs if not re.search(rf"^{verb}:", makefile, re.MULTILINE)] == []


def test_every_recipe_is_in_the_contents() -> None:
    recipes = re.findall(r"^## (Add .+)$", CONTRIBUTING, re.MULTILINE)
    assert len(recipes) == 10
    assert [name for name in recipes if f"(#{name.lower().replace(' ', '-')})" not in CONTRIBUTING] == []


def leaves(nav: Any) -> list[str]:
    """The pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(part)]


def test_the_navigation_has_every_page_once() -> None:
    pages = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(page for page in pages if "/" not in page) == sorted(
        page.name for page in (ROOT / "docs").glob("*.md")
    )
    others = [page.removeprefix("repository/") for page in pages if "/" in page]
    assert [page for page in others if not (ROOT / page).is_file()] == []


def test_the_site_is_whole_and_needs_no_other_host(tmp_path: Path) -> None:
    """mkdocs fails on a link or an anchor that leads nowhere."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    assert {"index.html", "security.html", "repository/CONTRIBUTING.html"} <= pages.keys()
    tags = re.compile(r"<(?:script|link)[^>]* (?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert {name: found for name, page in pages.items() if (found := tags.findall(page))} == {}
    assert 'href="repository/protos/penstock/v1/generation.proto.html"' in pages["grpc.html"]
