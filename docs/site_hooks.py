"""Hooks of mkdocs, which mkdocs.yml names. They make the links of docs/ work on the site as they do on GitHub.

A link to a file outside docs/, such as ``../protos/penstock/v1/model.proto``, leads to a page of the site with the text
of that file. A link to a file that does not exist stays as it is, and mkdocs reports it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
COPIES = "repository/"
"""The folder of the site with the pages of files outside docs/."""
LINK = re.compile(
    r"(?P<code>^```.*?^```|`+[^`]+`+)|(?<=\]\()(?![a-z]+:|#|/)(?P<path>[^)#\s]+)", re.DOTALL | re.MULTILINE
)
"""A block of code, where nothing is a link, or the path of a relative link."""
LANGUAGES = {
    ".h": "cpp",
    ".html": "html",
    ".json": "json",
    ".proto": "proto",
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the anchors that they have on GitHub."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside docs/ that the navigation names or a page links to."""
    paths = re.findall(rf"'{COPIES}(.*?)'", str(config.nav))
    paths += [path for page in files.documentation_pages() for path in outside_links(page.src_uri, page.content_string)]
    for path in paths:  # grows: the new pages link to further files
        if files.get_file_from_path(page_of(path)) is None:
            content = content_of(path)
            files.append(File.generated(config, page_of(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            paths += outside_links(page_of(path), content)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files outside docs/ at their pages."""
    uri = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        path = match["path"] and target_of(uri, match["path"])
        if not path:
            return match[0]
        return posixpath.relpath(page_of(path), posixpath.dirname(uri))

    return LINK.sub(replaced, markdown)


def outside_links(uri: str, markdown: str) -> list[str]:
    """The files outside docs/ that a page of the site links to."""
    paths = [target_of(uri, match["path"]) for match in LINK.finditer(markdown) if match["path"]]
    return [path for path in paths if path and not path.startswith(DOCS)]


def target_of(uri: str, link: str) -> str:
    """The path in the repository that a relative link of a page leads to; empty if there is no such file or folder."""
    source = uri.removeprefix(COPIES) if uri.startswith(COPIES) else DOCS + uri
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else ""


def page_of(path: str) -> str:
    """The name on the site of a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return COPIES + path if path.endswith(".md") else f"{COPIES}{path}.md"


def content_of(path: str) -> str:
    """Markdown with the text of a file, or with the names in a folder. The search leaves out what is not Markdown."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        text = "\n".join(f"- `{each.name}`" for each in sorted(file.iterdir()) if each.name[0] not in "._")
    else:
        text = f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}\n````"
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{text}\n"
