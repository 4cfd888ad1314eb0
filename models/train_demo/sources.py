"""Lists the Debian packages that the demo model is trained on, their licences, and the files that are read.

extract.py converts the files to text. Every package is from Debian's main section, whose licences all permit
redistribution and derived works. The licence in the table is that of the files that are read.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Reader(Enum):
    """The format of a source's files."""

    HTML = auto()
    MAN = auto()
    MALLARD = auto()
    PLAIN = auto()
    WORDNET = auto()


@dataclass(frozen=True)
class CorpusSource:
    """Files of one package: those that match the glob `pattern` and whose path contains no element of `without`."""

    package: str
    domain: str
    licence: str
    reader: Reader
    pattern: str
    without: tuple[str, ...] = ()


_MAN = "usr/share/man/man[1-8]/*.gz"
_DOC = "usr/share/doc"

SOURCES: tuple[CorpusSource, ...] = (
    CorpusSource("manpages", "manuals", "GPL-2+, MIT, BSD, Linux-man-pages-copyleft", Reader.MAN, _MAN),
    CorpusSource("manpages-dev", "manuals", "GPL-2+, MIT, BSD, Linux-man-pages-copyleft", Reader.MAN, _MAN),
    CorpusSource("coreutils", "manuals", "GPL-3+", Reader.MAN, _MAN),
    CorpusSource("util-linux", "manuals", "GPL-2+, BSD, public domain", Reader.MAN, _MAN),
    CorpusSource("systemd", "manuals", "LGPL-2.1+", Reader.MAN, _MAN),
    CorpusSource("git-man", "manuals", "GPL-2", Reader.MAN, _MAN),
    CorpusSource("git-doc", "manuals", "GPL-2", Reader.PLAIN, f"{_DOC}/git-doc/[ht]*/*.txt"),
    CorpusSource("perl-doc", "perl", "Artistic or GPL-1+", Reader.MAN, "usr/share/man/man[1-8]/*.gz"),
    CorpusSource(
        "debian-handbook", "debian", "GPL-2+ or CC-BY-SA-3.0", Reader.HTML, f"{_DOC}/debian-handbook/html/en-US/*.html"
    ),
    CorpusSource("debian-reference-en", "debian", "GPL-2+", Reader.HTML, "usr/share/debian-reference/*.en.html"),
    CorpusSource(
        "debian-policy",
        "debian",
        "GPL-2+",
        Reader.HTML,
        f"{_DOC}/debian-policy/policy.html/*.html",
        ("genindex", "search"),
    ),
    CorpusSource("developers-reference", "debian", "GPL-2+", Reader.HTML, "usr/share/developers-reference/*.html"),
    CorpusSource("maint-guide", "debian", "GPL-2+", Reader.HTML, f"{_DOC}/maint-guide/html/*.html"),
    CorpusSource("debian-faq", "debian", "GPL-2+", Reader.HTML, f"{_DOC}/debian/FAQ/*.html"),
    CorpusSource(
        "installation-guide-amd64", "debian", "GPL-2", Reader.HTML, f"{_DOC}/installation-guide-amd64/en/*.html"
    ),
    CorpusSource("harden-doc", "debian", "GPL-2", Reader.HTML, f"{_DOC}/harden-doc/html/en-US/*.html"),
    CorpusSource("aptitude-doc-en", "debian", "GPL-2+", Reader.HTML, f"{_DOC}/aptitude/html/en/*.html"),
    CorpusSource("debian-kernel-handbook", "debian", "GPL-2+", Reader.HTML, f"{_DOC}/debian-kernel-handbook/**/*.html"),
    CorpusSource(
        "python3.11-doc", "python", "PSF-2.0", Reader.HTML, f"{_DOC}/python3.11/html/*/*.html", ("_modules", "whatsnew")
    ),
    CorpusSource(
        "python-django-doc",
        "python",
        "BSD-3-Clause",
        Reader.HTML,
        f"{_DOC}/python-django-doc/html/*/**/*.html",
        ("_modules", "releases"),
    ),
    CorpusSource(
        "python-sqlalchemy-doc", "python", "MIT", Reader.PLAIN, f"{_DOC}/python-sqlalchemy-doc/**/*.rst", ("changelog",)
    ),
    CorpusSource(
        "postgresql-doc-15",
        "databases",
        "PostgreSQL",
        Reader.HTML,
        f"{_DOC}/postgresql-doc-15/html/*.html",
        ("release", "bookindex", "features"),
    ),
    CorpusSource(
        "sqlite3-doc", "databases", "public domain", Reader.HTML, f"{_DOC}/sqlite3/*.html", ("changes", "keyword_index")
    ),
    CorpusSource(
        "linux-doc-6.1",
        "kernel",
        "GPL-2",
        Reader.PLAIN,
        f"{_DOC}/linux-doc-6.1/html/_sources/**/*.rst.txt",
        ("translations", "/media/", "features"),
    ),
    CorpusSource("apache2-doc", "servers", "Apache-2.0", Reader.HTML, f"{_DOC}/apache2-doc/manual/en/**/*.html"),
    CorpusSource("exim4-doc-html", "servers", "GPL-2+", Reader.HTML, f"{_DOC}/exim4-doc-html/spec_html/ch-*.html"),
    CorpusSource(
        "rust-doc",
        "rust",
        "MIT or Apache-2.0",
        Reader.HTML,
        f"{_DOC}/rust-doc/html/[benrcu]*/**/*.html",
        ("/core/", "print.html", "/book/first-edition", "/book/second-edition", "/book/2018-edition", "rustdoc"),
    ),
    CorpusSource("vim-runtime", "editors", "Vim", Reader.PLAIN, "usr/share/vim/vim90/doc/*.txt", ("version", "todo")),
    CorpusSource("gnome-user-docs", "desktop", "CC-BY-SA-3.0", Reader.MALLARD, "usr/share/help/C/**/*.page"),
    CorpusSource(
        "libreoffice-help-en-us", "desktop", "MPL-2.0", Reader.HTML, "usr/share/libreoffice/help/en-US/text/**/*.html"
    ),
    CorpusSource("wordnet-base", "dictionary", "WordNet-3.0", Reader.WORDNET, "usr/share/wordnet/data.*"),
)
