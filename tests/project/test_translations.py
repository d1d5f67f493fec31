"""The Chinese pages have the headings, code blocks and tables of the English ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRANSLATED = sorted(ROOT.glob("*.zh-CN.md")) + sorted((ROOT / "docs").glob("*.zh-CN.md"))
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def test_translations_exist() -> None:
    assert [file.name for file in TRANSLATED] == ["README.zh-CN.md", "tutorial.zh-CN.md"]


@pytest.mark.parametrize("file", TRANSLATED, ids=lambda file: file.name)
def test_translation_has_the_structure_of_its_original(file: Path) -> None:
    original = file.with_name(file.name.replace(".zh-CN", "")).read_text()
    translated = file.read_text()
    assert BLOCK.findall(translated) == BLOCK.findall(original)
    prose, other = BLOCK.sub("", translated), BLOCK.sub("", original)
    for mark in (r"^#+ ", r"^\|", r"^- "):  # headings, table rows, list items
        assert re.findall(mark, prose, re.MULTILINE) == re.findall(mark, other, re.MULTILINE), mark
    links = re.compile(r"\]\(([^)]+)\)")
    assert file.name in links.findall(other), "the original links to its translation"
    assert set(links.findall(prose)) <= {*links.findall(other), file.name.replace(".zh-CN", "")}
