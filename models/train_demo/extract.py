"""Converts files of Debian packages to plain text, with one function per format. sources.py lists the packages."""

import gzip
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

HEADINGS = frozenset(f"h{level}" for level in range(1, 7))
BLOCKS = HEADINGS.union(
    [
        "p",
        "div",
        "li",
        "ul",
        "ol",
        "dl",
        "dt",
        "dd",
        "table",
        "tr",
        "pre",
        "section",
        "article",
        "blockquote",
        "br",
        "hr",
    ],
    ["main"],
)
SKIPPED = frozenset(
    [
        "script",
        "style",
        "nav",
        "header",
        "footer",
        "aside",
        "head",
        "button",
        "noscript",
        "form",
        "select",
        "svg",
        "title",
    ]
)
SKIPPED_CLASS = re.compile(
    r"headerlink|sphinxsidebar|\brelated\b|nav(header|footer)|mobile-nav|breadcrumb|toc\b|langs\b|menu|nosearch"
    r"|desktoponly|mobileonly"
)
VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])


class TextOfHtml(HTMLParser):
    """Collects a page's prose: one line per paragraph, an empty line after each block, the lines of `pre` unchanged."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open_tags: list[tuple[str, bool]] = []
        self.skipping = 0
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "table", "dl") or tag[0] == "h" else "\n")
        if tag in ("td", "th"):
            self.parts.append("  ")
        if tag == "li":
            self.parts.append("- ")
        if tag in VOID:
            return
        names = " ".join(value or "" for name, value in attrs if name in ("class", "id", "role"))
        skipped = tag in SKIPPED or SKIPPED_CLASS.search(names) is not None
        self.open_tags.append((tag, skipped))
        self.skipping += skipped
        self.verbatim += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag not in (name for name, _ in self.open_tags):
            return
        while self.open_tags:
            name, skipped = self.open_tags.pop()
            self.skipping -= skipped
            self.verbatim -= name == "pre"
            if name == tag:
                break
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "table", "dl") or tag[0] == "h" else "\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def read_bytes(path: Path) -> bytes:
    """Returns the content of `path`, decompressed if its name ends in .gz."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def tidy(text: str) -> str:
    """Removes trailing blanks and repeated empty lines, replaces no-break spaces, and adds one line feed at the end."""
    text = text.replace("\r\n", "\n").replace("\u00a0", " ").replace("\u00ad", "").replace("\u00b6", "")
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    text = re.sub(r"^(- ?\n+)", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def from_html(path: Path) -> str:
    """Returns the prose of an HTML page without its navigation."""
    parser = TextOfHtml()
    page = read_bytes(path).decode("utf-8", errors="replace")
    main = re.search(r'<(main|div)[^>]*(role="main"|class="body"|id="DisplayArea")[^>]*>|<main>', page)
    parser.feed(page[main.start() :] if main else page)
    lines = "".join(parser.parts).split("\n")
    return tidy("\n".join(line if line.startswith("   ") else line.strip() for line in lines))


def from_man(path: Path) -> str:
    """Returns a manual page as groff renders it, 100 columns wide, without header and footer."""
    source = read_bytes(path)
    if source.startswith(b".so "):
        return ""
    command = ["groff", "-mandoc", "-Kutf8", "-Tutf8", "-t", "-P-cbou", "-rLL=100n", "-rHY=0", "-w", "error"]
    ragged = b".na\n.de ad\n..\n"  # left-aligned, because a justified line would be full of double blanks
    done = subprocess.run(command, input=ragged + source, capture_output=True, check=False)
    lines = done.stdout.decode("utf-8", errors="replace").strip("\n").split("\n")
    text = "\n".join(lines[1:-1]).replace("\u2010", "-").replace("\u2212", "-")
    return tidy(re.sub(r"^ {7}", "    ", text, flags=re.MULTILINE))


def from_plain(path: Path) -> str:
    """Returns a text file, tidied."""
    return tidy(read_bytes(path).decode("utf-8", errors="replace").expandtabs(8))


def from_mallard(path: Path) -> str:
    """Returns a page of GNOME's help: the title in the first line, then the paragraphs, with numbered steps."""
    spaces = re.compile(r"\s+")
    out: list[str] = []

    def visit(node: ElementTree.Element) -> None:
        tag = node.tag.rpartition("}")[2]
        if tag in ("info", "media", "comment"):
            return
        if tag in ("code", "screen"):
            out.append("".join(node.itertext()).strip("\n"))
            return
        if tag in ("p", "title"):
            out.append(spaces.sub(" ", "".join(node.itertext())).strip())
            return
        for number, child in enumerate(node):
            mark = {"steps": f"{number + 1}. ", "list": "- "}.get(tag, "")
            before = len(out)
            visit(child)
            if mark and len(out) > before:
                out[before] = mark + out[before]

    visit(ElementTree.fromstring(read_bytes(path)))  # noqa: S314 - from a signed Debian package
    return tidy("\n\n".join(line for line in out if line))


READERS: dict[str, Callable[[Path], str]] = {
    "HTML": from_html,
    "MAN": from_man,
    "MALLARD": from_mallard,
    "PLAIN": from_plain,
}
