"""The command that installs a missing package or extra."""

import re
import shlex
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from agentrl.workflow.settings import settings

ROOT = Path(__file__).parents[2]
"""The checkout, if agentrl is imported from one."""

_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_PACKAGE = re.compile(r"([\w.-]+)")


def install_command(*names: str) -> str:
    """Return the pip command that installs extras of agentrl, or packages that agentrl needs.

    In a checkout, the command names the extras: `pip install -e 'CHECKOUT[mcp]'`. Elsewhere, the command lists their packages
    with the versions that agentrl's metadata allows: `pip install 'mcp<3,>=2'`. The command never names the package agentrl,
    because the package index has another project of that name. In the image of the compose stack, which is read-only, the hint
    names the build argument instead.

    Args:
        names: extras and packages of agentrl's metadata. If an extra and a package have the same name, the name means the
            extra.
    """
    if settings().image:
        return f"add to AGENTRL_EXTRAS in .env: {','.join(names)}; then: docker compose up -d --build"
    try:
        ours = metadata.metadata("agentrl")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return f"pip install -e {shlex.quote(str(ROOT))}"
    extras = set(ours.get_all("Provides-Extra") or ())
    if extras.issuperset(names) and (ROOT / "pyproject.toml").is_file():
        target = f"{ROOT}[{','.join(names)}]"
        return f"pip install -e {shlex.quote(target)}"
    requirements = [line for line in ours.get_all("Requires-Dist") or () if _belongs_to(line, names)]
    if not requirements:  # the metadata is of another version than the code
        return (
            f"pip install -e {shlex.quote(str(ROOT))}"
            if (ROOT / "pyproject.toml").is_file()
            else f"pip install {' '.join(names)}"
        )
    return f"pip install {' '.join(shlex.quote(line.partition(';')[0].strip()) for line in requirements)}"


def _belongs_to(requirement: str, names: Collection[str]) -> bool:
    name = _EXTRA.search(requirement) or _PACKAGE.match(requirement)
    return bool(name and name[1] in names)
