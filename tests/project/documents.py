"""The documents as people read them: their pages, the code that they show, their headings and links."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")), *sorted(DOCS.glob("*.md")))
"""Every document, the front page first."""


def between(page: Path, mark: str, language: str) -> list[str]:
    """The code blocks of that language between `<!-- mark -->` and `<!-- /mark -->`."""
    part = page.read_text().split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]
    return re.findall(rf"```{language}\n(.*?)```", part, re.DOTALL)


def section(page: Path, title: str) -> str:
    """What stands between the heading and the next one of its level or a higher one."""
    level = len(title) - len(title.lstrip("#"))
    begun = f"\n{page.read_text()}".split(f"\n{title}\n")[1]
    return re.split(rf"^#{{1,{level}}} ", begun, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a text's table rows; its heading and rule are left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def shown(page: Path) -> Iterator[str]:
    """The code that a page shows: the lines of its blocks, and what stands in back-ticks."""
    text = page.read_text()
    for block in re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    yield from re.findall(r"`([^`]+)`", _prose(text))


def anchors(page: Path) -> set[str]:
    """What a link may name after `#`, as GitHub makes it of the headings."""
    headings = re.findall(r"^#+ (.+)$", _without_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Where its links and pictures lead."""
    return re.findall(r"\]\(([^)\s]+)\)", _prose(page.read_text()))


def _prose(text: str) -> str:
    return re.sub(r"^ {4}.*$", "", _without_blocks(text), flags=re.MULTILINE)


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
