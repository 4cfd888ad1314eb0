"""The pages below docs/: their links lead somewhere, the map has all of them, and the lists in them are whole."""

import re
from pathlib import Path

import pytest

from penstock.models.architecture.lines import GGUF, LINES, markdown
from penstock.models.architecture.registry import FAMILIES, WRAPPERS
from penstock.models.checkpoint.gguf.families import FAMILIES as GGUF_FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that links may use: those that GitHub makes of headings, and those that the page gives."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', prose(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_map_has_every_page_once() -> None:
    index = ROOT / "docs/index.md"
    listed = re.findall(r"^- \[[^]]+\]\((\w+\.md)\): ", index.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES[1:] if page != index]


def test_supported_models_has_the_matrix() -> None:
    page = (ROOT / "docs/supported_models.md").read_text(encoding="utf-8")
    assert markdown() in page, "replace the table with the output of penstock.models.architecture.lines.markdown()"


def test_the_matrix_has_every_architecture_that_is_served() -> None:
    named = {name for line in LINES for name in line.architectures}
    served = FAMILIES.keys() | set(WRAPPERS)
    assert named - {"Qwen3Model"} == served, "correct LINES in models/architecture/lines.py"
    assert [line.name for line in LINES if not line.architectures and not line.left_out] == []


def test_the_matrix_has_every_family_of_gguf_files() -> None:
    assert set(GGUF.values()) == GGUF_FAMILIES.keys()
    assert GGUF.keys() <= FAMILIES.keys() | set(WRAPPERS)
