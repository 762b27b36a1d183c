"""The target file and heading of every relative link in the Markdown pages exist."""

import re
from pathlib import Path

import pytest
from support import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
PAGES += ROOT.glob("tools/*.md")
SOURCES = ("src", "python/ringstow", "python/tests", "tools", "tests", "benches", "examples")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r"\bdocs/[\w/-]+\.md\b")

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").exists(), reason="the documentation is not here"
)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub derives from a page's headings."""
    headings = HEADING.findall(CODE.sub("", page.read_text()))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def broken(page: Path) -> list[str]:
    wrong = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_page_exist(page: Path) -> None:
    assert broken(page) == []


def test_link_checker_finds_broken_links(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b, `c`\n[1](#a-b-c) [2](#a-b) [3](none.md) [4](https://example.org)\n")
    assert broken(page) == ["#a-b", "none.md"]


def test_pages_named_in_sources_exist() -> None:
    files = [file for name in SOURCES for file in (ROOT / name).rglob("*.*")]
    wrong = [
        f"{file.relative_to(ROOT)}: {page}"
        for file in files
        if file.suffix in {".rs", ".py"}
        for page in NAMED.findall(file.read_text())
        if not (ROOT / page).exists()
    ]
    assert wrong == []
