"""Collect the pages of the docs site in build/docs: those of docs/, those elsewhere in the repository, and the live demo.

`make docs` runs this and then Zensical, which builds the site and fails on a broken link.
"""

import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from agentrl.workers.page.demo import open_demo  # noqa: E402
from agentrl.workers.page.export import write_export  # noqa: E402
from agentrl.workers.page.read_only import ReadOnlyStore  # noqa: E402
from hatch_build import read_settings  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
"""The repository's pages outside docs/, each with its name in the site."""
DEMO_RUN, DEMO_BYTES = "demo", 5_000_000
DEMO_PAGE = """# A live demo

This is a real run of the quickstart's tiny model, as `agentrl ui --export` writes it: one file, without a server.
[Open it in a tab of its own](demo-run.html), or type `agentrl ui --demo`.

<iframe src="demo-run.html" title="The page with a demo run" style="width: 100%; height: 80vh; border: 0"></iframe>
"""
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.M | re.S)


def main() -> None:
    """Write build/docs."""
    site = ROOT / "build" / "docs"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "docs", site)
    for file in (ROOT / "docs").glob("*.md"):
        (site / file.name).write_text(with_site_links(file.read_text(), f"docs/{file.name}"))
    for source, name in PAGES.items():
        (site / name).write_text(with_site_links((ROOT / source).read_text(), source))
    (site / "demo.md").write_text(DEMO_PAGE)
    write_export(ReadOnlyStore(open_demo()), DEMO_RUN, site / "demo-run.html", [], DEMO_BYTES, True, print)


def with_site_links(markdown: str, source: str) -> str:
    """Return a page of the repository with links that work in the site. Code is left alone.

    A link to a file that is not in the site becomes a URL of the repository, or plain text as long as the repository has no
    address.

    Args:
        markdown: the text of the page.
        source: the page's path in the repository.
    """
    repository, _ = read_settings(ROOT)

    def rewrite(link: re.Match[str]) -> str:
        label, anchor = link[1], link[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if target in PAGES:
            return f"{label}({PAGES[target]}{anchor})"
        if target.startswith("docs/"):
            return f"{label}({target.removeprefix('docs/')}{anchor})"
        return f"{label}({repository}/blob/HEAD/{target}{anchor})" if repository else label.strip("[]")

    return "".join(part if part.startswith("`") else LINK.sub(rewrite, part) for part in CODE.split(markdown))


if __name__ == "__main__":
    main()
