"""The page's own files: small, joined by their imports alone, and with nothing in them that turns a text into markup."""

import gzip
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

STATIC = Path(__file__).parents[2] / "agentrl/workers/page/static"
OWN = sorted(STATIC.glob("*.js"))
TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
IMPORT = re.compile(r'^import (?:\w+|\{ [\w, ]+ \}) from "\./((?:vendor/)?\w+\.js)";$')
MAX_BYTES = 250_000
MARKUP = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "dangerouslySetInnerHTML",
    "document.write",
    "eval(",
    "new Function",
    "srcdoc",
)


def test_page_files_are_under_250_kb_compressed() -> None:
    files = [file for file in STATIC.rglob("*") if file.is_file() and file.suffix in (".html", ".css", ".js", ".svg")]
    assert len(files) > 10
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) <= MAX_BYTES


def test_page_files_define_each_name_once() -> None:
    names = [name for file in OWN for name in TOP_LEVEL.findall(file.read_text())]
    assert len(names) > 100
    assert {name for name in names if names.count(name) > 1} == set()


def test_page_files_import_existing_files_one_by_line() -> None:
    for file in OWN:
        for line in file.read_text().splitlines():
            if line.startswith("import"):
                found = IMPORT.match(line)
                assert found, (file.name, line)
                assert (STATIC / found[1]).is_file(), (file.name, line)
            assert "import(" not in line, (file.name, line)


def test_page_files_ask_for_types_to_be_checked() -> None:
    assert [file.name for file in OWN if not file.read_text().startswith("// @ts-check\n")] == []


def test_page_files_make_no_markup_of_text_and_ask_no_other_host() -> None:
    for file in OWN:
        text = file.read_text()
        assert [word for word in MARKUP if word in text] == [], file.name
        assert re.findall(r"https?://", text) == [], file.name
    assert "http" not in re.sub(r"<!.*?>", "", (STATIC / "index.html").read_text())


def test_page_vendored_files_name_version_and_licence() -> None:
    said = (STATIC / "vendor/LICENSES.txt").read_text()
    for file in (STATIC / "vendor").glob("*.*s"):
        assert file.name in said, file.name
    for words in ("uPlot 1.6.32 (MIT)", "htm 3.1.1", "Apache License", "MIT License"):
        assert words in said, words


def test_page_preloads_every_module() -> None:
    page = (STATIC / "index.html").read_text()
    wanted = {f"static/{file.relative_to(STATIC).as_posix()}" for file in STATIC.rglob("*.js")}
    asked = set(re.findall(r'rel="modulepreload" href="(.*?)"', page)) | set(
        re.findall(r'<script type="module" src="(.*?)"', page)
    )
    assert asked == wanted


SHADE = re.compile(r"\.(\w+-\d) \{ background: color-mix\(in srgb, var\(--(line-\d)\) (\d+)%, transparent\); \}")


def luminance(color: Sequence[float]) -> float:
    """The relative luminance of red, green and blue from 0 to 255 (WCAG 2.2)."""
    linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_page_token_shades_have_contrast_in_both_themes() -> None:
    css = (STATIC / "app.css").read_text()
    shades = SHADE.findall(css)
    assert len(shades) == 3 * 8
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in css.split('[data-theme="dark"]', 1))
    for theme in (light, light | dark):
        color = {name: [int(text[at : at + 2], 16) for at in (1, 3, 5)] for name, text in theme.items()}
        for (name, line, share), under in itertools.product(shades, ("paper", "sheet")):
            mixed = [int(share) / 100 * a + (1 - int(share) / 100) * b for a, b in zip(color[line], color[under], strict=True)]
            low, high = sorted((luminance(mixed), luminance(color["ink"])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, under)
