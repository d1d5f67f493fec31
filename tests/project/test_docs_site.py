"""The docs site, built as `make docs` builds it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_docs_site_builds_without_broken_links() -> None:
    subprocess.run([sys.executable, ".ci/docs_site.py"], cwd=ROOT, check=True)
    built = subprocess.run(
        [str(Path(sys.executable).with_name("zensical")), "build", "--strict"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "build" / "site"
    assert {file.stem for file in (ROOT / "docs").glob("*.md")} <= {file.stem for file in site.glob("*.html")}
    assert 100_000 < (site / "demo-run.html").stat().st_size < 5_000_000
    for file in site.glob("*.html"):  # no page loads anything from another host
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(https?://[^\"> ]+)", file.read_text())
        assert not loaded, (file.name, loaded)


def test_docs_site_rewrites_links_but_not_code() -> None:
    with_site_links = runpy.run_path(str(ROOT / ".ci" / "docs_site.py"))["with_site_links"]
    page = "[a](../SECURITY.md#b), [c](views.md), [d](../agentrl/cli/ui.py), `[e](f.md)`\n```\n[g](h.md)\n```\n"
    expected = "[a](security.md#b), [c](views.md), d, `[e](f.md)`\n```\n[g](h.md)\n```\n"
    assert with_site_links(page, "docs/page.md") == expected
