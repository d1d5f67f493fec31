"""Write what depends on the repository's address: the package's metadata, README.md, both tutorials and CITATION.cff.

The address and the authors are in `[tool.agentrl]` of pyproject.toml. A build reads them through `RepositoryMetadata`; `make
address` writes them into the files.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
INSTALL = re.compile(r"(?<=<!-- install -->\n).*?(?=<!-- /install -->)", re.DOTALL)
BADGE = re.compile(r"(?<=\A# agentrl).*")
PAGES = {"README.md": BADGE, "README.zh-CN.md": BADGE, "docs/tutorial.md": INSTALL, "docs/tutorial.zh-CN.md": INSTALL}
"""The pages that depend on the address, each with the place of its text."""
RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)]+)\)")


class RepositoryMetadata(MetadataHookInterface):
    """Metadata of the package: its page, and the URLs and authors if they are known."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields that pyproject.toml calls dynamic."""
        repository, authors = read_settings(Path(self.root))
        page = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(page, repository)}
        if repository:
            metadata["urls"] = {"Repository": repository, "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md"}
        if authors:
            metadata["authors"] = [{"name": name} for name in authors]


def read_settings(root: Path) -> tuple[str, list[str]]:
    """Return the repository's URL, which may be empty, and the authors' names."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["agentrl"]
    return settings["repository"].rstrip("/"), settings["authors"]


def absolute_links(page: str, repository: str) -> str:
    """Return the page with links to files of the repository as URLs, if the repository is known."""
    if not repository:
        return page
    folders = {"!": "raw", "": "blob"}
    return RELATIVE_LINK.sub(lambda link: f"{link[1]}{link[2]}({repository}/{folders[link[1]]}/HEAD/{link[3]})", page)


def badge(repository: str) -> str:
    """Return what follows the title of README.md."""
    workflow = f"{repository}/actions/workflows/ci.yml"
    return f" [![ci]({workflow}/badge.svg)]({workflow})" if repository else ""


def install_lines(repository: str) -> str:
    """Return the commands that install agentrl, for the tutorials."""
    lines = ["pip install -e .                     # in the checkout; with extras: pip install -e '.[mcp,math,s3,gepa]'"]
    if repository:
        lines.append(f"pip install 'agentrl @ git+{repository}'")
    return "\n".join(["```sh", *lines, "```", ""])


def citation(repository: str, authors: list[str]) -> str:
    """Return CITATION.cff, or an empty text if the repository or its authors are not known."""
    if not (repository and authors):
        return ""
    names = "".join(f'  - name: "{name}"\n' for name in authors)
    head = 'cff-version: 1.2.0\nmessage: "If you use agentrl, please cite it."\ntitle: agentrl\ntype: software\nlicense: MIT\n'
    return f'{head}repository-code: "{repository}"\nauthors:\n{names}'


def write_address(root: Path) -> None:
    """Write README.md, both tutorials and CITATION.cff for the settings of this checkout."""
    repository, authors = read_settings(root)
    texts = {BADGE: badge(repository), INSTALL: install_lines(repository)}
    for name, pattern in PAGES.items():
        page = root / name
        page.write_text(pattern.sub(lambda _, text=texts[pattern]: text, page.read_text(), count=1))
    file, text = root / "CITATION.cff", citation(repository, authors)
    if text:
        file.write_text(text)
    else:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    write_address(ROOT)
