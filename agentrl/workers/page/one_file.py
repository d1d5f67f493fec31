"""Builds the page as one HTML file that needs no requests: modules, styles and recorded responses.

Each module becomes a function that returns its exports. The file's content security policy allows only the script and the style
with the right hashes, so no code in a recorded text can run.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.workers.page.service import STATIC

_IMPORT = re.compile(r'^import (\w+|\{[^}]*\}) from "\./([\w/]+\.js)";\n', re.MULTILINE)
_EXPORTED = re.compile(r"^export (?=(?:async )?(?:function|const|let|class) (\w+))", re.MULTILINE)
_EXPORT_LIST = re.compile(r"export ?\{([^{}]*)\};?\s*\Z")
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w/]+\.css)">\n')
_MODULES = re.compile(r'<link rel="modulepreload" [^>]*>\n')
_ICON = re.compile(r'<link rel="icon" href="static/(\w+\.svg)" type="image/svg\+xml">')
_SCRIPT = re.compile(r'<script type="module" src="static/(\w+\.js)"></script>')
_TITLE = "<title>agentrl</title>"


def write_page(title: str, about: Mapping[str, object], answers: Mapping[str, bytes]) -> bytes:
    """Return the HTML document of the page. `about` describes the file to the page. `answers` maps paths to recorded responses
    that `embed` has encoded.
    """
    index = _MODULES.sub("", (STATIC / "index.html").read_text(encoding="utf-8"))
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in _STYLE.findall(index))
    (first,) = _SCRIPT.findall(index)
    (icon,) = _ICON.findall(index)
    code = join_modules(STATIC, first)
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(code)}'; style-src 'sha256-{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    image = base64.b64encode((STATIC / icon).read_bytes()).decode()
    head, between = _STYLE.sub("", index).split(_TITLE)
    before, after = _SCRIPT.split(between)[::2]
    before = _ICON.sub(f'<link rel="icon" href="data:image/svg+xml;base64,{image}">\n<style>{style}</style>', before)
    policy_and_title = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{html.escape(title)}</title>'
    licenses = (STATIC / "vendor/LICENSES.txt").read_text(encoding="utf-8")
    recorded = b",".join(embed(path) + b":" + body for path, body in answers.items())
    parts = (
        f"{head}{policy_and_title}{before}".encode(),
        b'<script type="application/json" id="recorded">',
        embed(dict(about))[:-1],
        b',"answers":{',
        recorded,
        b"}}</script>\n",
        f'<script type="text/plain" id="licenses">\n{licenses}</script>\n'.encode(),
        f'<script type="module">{code}</script>{after}'.encode(),
    )
    return b"".join(parts)


def embed(value: object) -> bytes:
    """Encode a value as JSON that can be part of a script element."""
    return embed_json(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))


def embed_json(document: bytes) -> bytes:
    """Escape each `<` in the JSON text, so that no text in it can end the script element."""
    return document.replace(b"<", b"\\u003c")


def join_modules(folder: Path, first: str) -> str:
    """Return the source of one module that contains the module `first` and all modules that it imports, directly or not."""
    return "\n".join(_as_function(folder, name) for name in _in_order(folder, first, [])) + "\n"


def _in_order(folder: Path, name: str, modules: list[str]) -> list[str]:
    """Append the module to `modules`, after the modules that it imports. Return `modules`."""
    for _, needed in _IMPORT.findall(_source(folder, name)):
        _in_order(folder, needed, modules)
    if name not in modules:
        modules.append(name)
    return modules


def _as_function(folder: Path, name: str) -> str:
    source = _source(folder, name)
    source = _IMPORT.sub(_taken, source)
    if listed := _EXPORT_LIST.search(source):  # a vendored one: what looks like an export before it is in a comment
        exports, body = _returned(listed[1].split(",")), source[: listed.start()]
    else:
        exports, body = _EXPORTED.findall(source), _EXPORTED.sub("", source)
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _source(folder: Path, name: str) -> str:
    text = (folder / name).read_text(encoding="utf-8").replace("</script", "<\\/script")
    if "<!--" in text:
        raise ValueError(f"{name} has an HTML comment, which a script element cannot hold")
    return text


def _taken(match: re.Match[str]) -> str:
    names, name = match.groups()
    if not names.startswith("{"):
        return f"const {names} = {_variable(name)}.default;\n"
    return f"const {names.replace(' as ', ': ')} = {_variable(name)};\n"


def _returned(exports: Iterable[str]) -> list[str]:
    """Convert each export `a as b` to a property `b: a` of the returned object."""
    pairs = [word.split(" as ") for word in exports]
    return [f"{pair[-1].strip()}: {pair[0].strip()}" for pair in pairs]


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
