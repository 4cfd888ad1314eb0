"""Makes the demo model's corpus: downloads Debian packages, converts them to documents, and splits off the held-out
ones.

Writes train.jsonl, heldout.jsonl (one document per line: domain, key, text) and manifest.json (package, version,
licence, documents, bytes) to --work. Requires apt-get, dpkg-deb and groff. Packages are unpacked in --work, never
installed; an unpacked package is not downloaded again.

Examples:
    python prepare.py
    python prepare.py --work /data/demo-train --heldout-percent 1
"""

import argparse
import hashlib
import json
import random
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from penstock.models.train_demo import chat
from penstock.models.train_demo.extract import READERS, read_bytes
from penstock.models.train_demo.sources import SOURCES, CorpusSource, Reader

DEFAULT_WORK = Path("~/.cache/penstock/demo-train").expanduser()
OFFENSIVE = re.compile(r"\b(slurs?|offensive|derogatory|disparag\w*|obscen\w*|vulgar|sexual\w*|genital\w*|porn\w*)\b")
MAX_DOCUMENT = 200_000  # characters; longer documents are cut, so that no single page dominates a domain


@dataclass(frozen=True)
class Document:
    """A text with the domain under which it is counted, and the key whose hash decides whether it is held out."""

    domain: str
    key: str
    text: str
    package: str


class Seen:
    """Drops paragraphs of earlier documents: boilerplate, and text that would leak into the held-out set."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def fresh(self, text: str) -> str:
        """Returns the text without the paragraphs of 60 or more characters that were seen before."""
        kept = []
        for paragraph in text.split("\n\n"):
            digest = hashlib.md5(" ".join(paragraph.split()).encode(), usedforsecurity=False).digest()
            if len(paragraph) < 60 or digest not in self.hashes:
                kept.append(paragraph)
            if len(paragraph) >= 60:
                self.hashes.add(digest)
        return "\n\n".join(kept)


def unpack(package: str, work: Path) -> Path:
    """Downloads and unpacks a package if its folder is not complete. Returns the folder."""
    folder = work / "root" / package
    if not (folder / ".complete").exists():
        debs = work / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", package], cwd=debs, check=True, capture_output=True)
        newest = max(debs.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", newest, folder], check=True)
        version = subprocess.run(
            ["dpkg-deb", "-f", newest, "Version"], check=True, capture_output=True, text=True
        ).stdout
        (folder / ".complete").write_text(version)
    return folder


def without_common_lead(pages: list[str]) -> list[str]:
    """Removes navigation: the leading lines of each page that are among the first 40 of a fifth of the pages."""
    leads = Counter(line for page in pages for line in set(page.split("\n")[:40]))
    common = {line for line, count in leads.items() if count > max(3, len(pages) / 5)}
    cleaned = []
    for page in pages:
        lines = page.split("\n")
        start = next((i for i, line in enumerate(lines) if line and line not in common), len(lines))
        cleaned.append("\n".join(lines[start:]))
    return cleaned


def read_pages(source: CorpusSource, folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (path within the package, text) for each page of a source."""
    paths = sorted(path for path in folder.glob(source.pattern) if path.is_file())
    names = [str(path.relative_to(folder)) for path in paths]
    chosen = [(p, n) for p, n in zip(paths, names, strict=True) if not any(word in n for word in source.without)]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(READERS[source.reader.name], (path for path, _ in chosen)))
    if source.reader is Reader.HTML:
        texts = without_common_lead(texts)
    for (_, name), text in zip(chosen, texts, strict=True):
        yield name, text[:MAX_DOCUMENT]


def page_documents(source: CorpusSource, folder: Path, seen: Seen, rng: random.Random) -> Iterator[Document]:
    """Yields the pages of a package. Manual pages and help pages also occur in chat format."""
    for name, text in read_pages(source, folder):
        text = seen.fresh(text)
        if len(text) < 200 or sum(c.isascii() for c in text) < 0.97 * len(text):
            continue
        key = f"{source.package}/{name}"
        conversation = None
        if source.reader is Reader.MAN:
            page, _, section = Path(name).name.removesuffix(".gz").rpartition(".")
            conversation = chat.about_manual(page, section, text, rng)
        if source.reader is Reader.MALLARD:
            conversation = chat.about_help(text, rng)
        if conversation:
            rendered = chat.render(chat.with_system_prompt(conversation, rng))
            yield Document("chat: help", key, rendered, source.package)
        if source.reader is not Reader.MALLARD or rng.random() < 0.5:
            yield Document(source.domain, key, text, source.package)


def wordnet_documents(folder: Path, rng: random.Random) -> Iterator[Document]:
    """Yields WordNet without offensive words: conversations about one to four words, with each synset under its first
    word."""
    senses: defaultdict[str, list[str]] = defaultdict(list)
    names = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    for path in sorted(folder.glob("usr/share/wordnet/data.*")):
        for line in read_bytes(path).decode().split("\n"):
            fields, _, gloss = line.partition(" | ")
            if line.startswith("  ") or not gloss or OFFENSIVE.search(gloss):
                continue
            _, _, kind, count, *rest = fields.split(" ")
            words = [re.sub(r"\(.*\)", "", rest[2 * i]).replace("_", " ") for i in range(int(count, 16))]
            same = f" (also: {', '.join(words[1:4])})" if len(words) > 1 else ""
            senses[words[0]].append(f"{names[kind]}: {gloss.strip()}{same}")
    lemmas = sorted(senses)
    rng.shuffle(lemmas)
    while lemmas:
        chosen, lemmas = lemmas[-(size := rng.randint(1, 4)) :], lemmas[:-size]
        entries = []
        for word in chosen:
            items = senses[word]
            numbered = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
            article = "an" if items[0].startswith("a") else "a"
            entries.append((word, numbered if len(items) > 1 else f"{word} is {article} {items[0]}"))
        text = chat.render(chat.with_system_prompt(chat.about_words(entries, rng), rng))
        yield Document("chat: words", f"wordnet/{chosen[0]}", text, "wordnet-base")


def package_documents(work: Path, seen: Seen, rng: random.Random) -> Iterator[Document]:
    """Yields the descriptions of all packages in Debian's main section, half of them as conversations."""
    lists = work / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    found = sorted(lists.glob("*_debian_dists_*_main_i18n_Translation-en"))
    if not found:
        options = [
            "-o",
            "Acquire::Languages=en",
            "-o",
            f"Dir::State::Lists={lists}",
            "-o",
            "Acquire::GzipIndexes=false",
        ]
        subprocess.run(["apt-get", "update", "-q", *options], check=True, capture_output=True)
        found = sorted(lists.glob("*_debian_dists_*_main_i18n_Translation-en"))
    for stanza in max(found, key=lambda path: path.stat().st_size).read_text().split("\n\n"):
        match = re.match(r"Package: (\S+)\n.*\nDescription-en: (.*)\n((?: .*\n?)*)", stanza)
        if not match:
            continue
        name, summary = match[1], match[2]
        lines = [line[1:] for line in match[3].split("\n")]
        body = "\n".join("" if line == "." else line for line in lines)
        # Lines of a description that begin with a blank are verbatim; the others are joined.
        body = re.sub(r"(?<=\S)\n(?=[^\s*-])", " ", body)
        body = seen.fresh(body.strip())
        if not body.strip():
            continue
        if rng.random() < 0.5:
            talk = chat.about_package(name, summary, body, rng)
            text = chat.render(chat.with_system_prompt(talk, rng))
            yield Document("chat: packages", f"package/{name}", text, "descriptions")
        else:
            yield Document(
                "packages", f"package/{name}", f"Package: {name}\nDescription: {summary}\n\n{body}\n", "descriptions"
            )


def all_documents(work: Path, small_talk: int) -> Iterator[Document]:
    """Yields every document of the corpus in a fixed order."""
    rng = random.Random(1)
    seen = Seen()
    for source in tqdm(SOURCES, unit="package", desc="reading"):
        folder = unpack(source.package, work)
        if source.reader is Reader.WORDNET:
            yield from wordnet_documents(folder, rng)
        else:
            yield from page_documents(source, folder, seen, rng)
    yield from package_documents(work, seen, rng)
    for number, conversation in enumerate(chat.small_talk(rng, small_talk)):
        text = chat.render(chat.with_system_prompt(conversation, rng))
        yield Document("chat: small talk", f"small talk/{number}", text, "templates in chat.py")


def is_held_out(key: str, percent: float) -> bool:
    """Whether a document is held out. The hash of its key decides, so documents with the same key stay together."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 10_000 < percent * 100


def main() -> None:
    """Writes the corpus and its manifest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=DEFAULT_WORK, help="folder for packages and corpus (default: %(default)s)"
    )
    parser.add_argument(
        "--heldout-percent", type=float, default=1.0, help="share of the documents held out (default: 1)"
    )
    parser.add_argument("--small-talk", type=int, default=4000, help="small-talk conversations (default: 4000)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with (args.work / "train.jsonl").open("w") as train, (args.work / "heldout.jsonl").open("w") as heldout:
        for document in all_documents(args.work, args.small_talk):
            held_out = is_held_out(document.key, args.heldout_percent) and document.domain != "chat: small talk"
            line = {"domain": document.domain, "key": document.key, "text": document.text}
            (heldout if held_out else train).write(json.dumps(line, ensure_ascii=False) + "\n")
            size = len(document.text.encode())
            for group in (document.package, f"domain {document.domain}", "all"):
                counts[group].update({"documents": 1, "bytes": size, "heldout_bytes": size if held_out else 0})
    licences = {source.package: source.licence for source in SOURCES}
    packages = [
        {
            "package": name,
            "licence": licences[name],
            "version": (args.work / "root" / name / ".complete").read_text().strip(),
            **counts[name],
        }
        for name in licences
    ]
    manifest = {"packages": packages, "groups": {name: counts[name] for name in counts if name not in licences}}
    (args.work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest["groups"], indent=1))


if __name__ == "__main__":
    main()
