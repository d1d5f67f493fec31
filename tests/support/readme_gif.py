"""Makes the README's GIF of a real run: submit, `kill -9` of a worker, the curve goes on, a click on a dip, transcript, why.

`make pictures`: four minutes or so, into docs/agentrl.gif. The run is shown faster than it was; the clock shows its real time.
"""

import html
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from PIL import Image, ImageDraw
from sqlalchemy import text

from tests.support.browser import Service, chromium, service, settle
from tests.support.real_stack import Stack

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

GIF = Path("docs/agentrl.gif")
MAX_SECONDS = 12.0
MAX_BYTES = 1_500_000
WIDTH, HEIGHT = 800, 560
PAGE_HEIGHT = 362
"""The height of the page's part, in pixels, while the terminal is below it."""
TERMINAL_LINES = 11
TERMINAL_COLUMNS = 107
COLORS = 128
SETUP = ("sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "250")
SUBMIT = (
    *("submit", "--dataset", "arithmetic", "--model", "tiny", "--epochs", "1", "--learning-rate", "4e-4"),
    *("-s", "update.decay=cosine", "--name", "quickstart", "--wait"),
)
"""The commands of quickstart.sh."""
ROLES = "rollout,train"
KILL_AT = 12
"""The iteration in which the worker is killed."""
FRAME_MS = 100
RUN_FRAMES = 36
TYPING_MS = 60
SAMPLE_SECONDS = 0.5
REWARD_CHART = "figure.chart:has(h2:text-is('reward'))"
TERMINAL = """
<style>
  body {{ margin: 0; background: #16191d; color: #d9dee5; font: 12px/15px monospace; height: {height}px; overflow: hidden; }}
  p {{ margin: 0; background: #2a2f36; color: #aab3bf; padding: 3px 10px; display: flex; justify-content: space-between; }}
  pre {{ margin: 5px 10px; font: inherit; }} b {{ color: #7fd6a0; }} i {{ color: #ff9b90; font-style: normal; }}
</style>
<p><span>terminal</span><span>{clock}</span></p><pre>{lines}</pre>"""


@dataclass
class Recording:
    """What the page and the terminal showed, with seconds since the submit command was typed.

    Attributes:
        screens: the PNG of the page at each time.
        lines: the lines of the terminal.
        killed_at: when the worker was killed.
    """

    began: float = field(default_factory=time.monotonic)
    screens: list[tuple[float, bytes]] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    killed_at: float = 0.0

    def now(self) -> float:
        return time.monotonic() - self.began

    def screen(self, at: float) -> Image.Image:
        """Return the last screen of the page that was taken before this time."""
        index = max(0, bisect_right([taken for taken, _ in self.screens], at) - 1)
        return open_png(self.screens[index][1])

    def terminal_lines(self, at: float) -> list[str]:
        return [line for written, line in self.lines if written <= at]

    def add_output(self, stream: IO[str]) -> None:
        """Add each line of a process when it is written."""
        for line in stream:
            self.lines.append((self.now(), line.rstrip("\n")))


@dataclass
class Film:
    """The frames of the GIF, with their milliseconds."""

    terminal: "Page"
    frames: list[Image.Image] = field(default_factory=list)
    milliseconds: list[int] = field(default_factory=list)

    def add(self, frame: Image.Image, milliseconds: int = FRAME_MS) -> None:
        self.frames.append(frame.convert("RGB"))
        self.milliseconds.append(milliseconds)

    def add_split(
        self, screen: Image.Image, lines: Sequence[str], at: float, milliseconds: int = FRAME_MS, pointer: "Point | None" = None
    ) -> None:
        """Add the page above the terminal."""
        frame = Image.new("RGB", (WIDTH, HEIGHT))
        frame.paste(screen.crop((0, 0, WIDTH, PAGE_HEIGHT)))
        rows = [row for line in lines for row in color_line(line)]
        clock = f"real time {int(at) // 60}:{int(at) % 60:02d}"
        self.terminal.set_content(
            TERMINAL.format(height=HEIGHT - PAGE_HEIGHT, clock=clock, lines="\n".join(rows[-TERMINAL_LINES:]))
        )
        frame.paste(open_png(self.terminal.screenshot()), (0, PAGE_HEIGHT))
        self.add(frame if pointer is None else with_pointer(frame, pointer), milliseconds)

    def write(self, file: Path) -> None:
        """Write the GIF: one palette for all frames, and of each frame only the region that changed."""
        few = self.frames[:: max(1, len(self.frames) // 8)] + self.frames[-4:]
        mosaic = Image.new("RGB", (WIDTH, HEIGHT * len(few)))
        for index, frame in enumerate(few):
            mosaic.paste(frame, (0, HEIGHT * index))
        palette = mosaic.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE)
        first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        first.save(file, save_all=True, append_images=others, duration=self.milliseconds, loop=0, optimize=True, disposal=1)


Point = tuple[float, float]


def open_png(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def color_line(line: str) -> list[str]:
    """Return the line as the terminal shows it, in rows of HTML, with a green prompt and a red `kill`."""
    rows = [line[at : at + TERMINAL_COLUMNS] for at in range(0, max(1, len(line)), TERMINAL_COLUMNS)]
    escaped = [html.escape(row) for row in rows]
    if line.startswith("$ "):
        typed = escaped[0].removeprefix("$ ")
        escaped[0] = f"<b>$</b> {f'<i>{typed}</i>' if typed.startswith('kill') else typed}"
    return escaped


def with_pointer(frame: Image.Image, at: Point) -> Image.Image:
    """Return the frame with a mouse pointer whose tip is at this pixel."""
    x, y = at
    shape = [(0, 0), (0, 19), (5, 15), (8, 22), (11, 21), (8, 14), (14, 14)]
    copy = frame.convert("RGB")
    draw = ImageDraw.Draw(copy)
    draw.ellipse((x - 13, y - 13, x + 13, y + 13), outline="#c2570c", width=3)
    draw.polygon([(x + dx, y + dy) for dx, dy in shape], fill="#1b1f24", outline="#ffffff")
    return copy


def main() -> None:
    """Make the run and the GIF."""
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder, chromium() as browser:
        environment = {"AGENTRL_LEASE_SECONDS": "30", "AGENTRL_TICK_SECONDS": "2", "AGENTRL_IDLE_STOP_SECONDS": "60"}
        stack = Stack(Path(folder) / "home", **environment)
        try:
            stack.agentrl(*SETUP)
            stack.agentrl("db", "upgrade")
            terminal = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT - PAGE_HEIGHT})
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            film = Film(terminal)
            with service(stack.home) as served:
                recording = record_run(stack, served, page)
                show_run(film, recording)
                show_reason(film, recording, stack, page)
        finally:
            stack.close()
    film.write(GIF)
    seconds, size = sum(film.milliseconds) / 1000, GIF.stat().st_size
    print(f"{GIF}: {size:,} bytes, {seconds:.1f} s, {len(film.frames)} frames; the run took {recording.screens[-1][0]:.0f} s")
    if seconds > MAX_SECONDS or size > MAX_BYTES:
        raise SystemExit(f"The GIF is too large: at most {MAX_SECONDS:.0f} s and {MAX_BYTES:,} bytes.")


def record_run(stack: Stack, served: Service, page: "Page") -> Recording:
    """Submit the run, kill its worker in the middle, and record until it is done."""
    page.goto(served.url)
    page.wait_for_selector("main h1")
    settle(page)
    recording = Recording()
    command = [sys.executable, "-m", "agentrl.cli", *SUBMIT]
    with subprocess.Popen(
        command, env=stack.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=recording.add_output, args=(process.stdout,))
        reader.start()
        while process.poll() is None:
            if "#/run/" not in page.url and any("submitted," in line for _, line in recording.lines):
                page.goto(f"{served.url}#/run/1?tab=curves")
                page.wait_for_selector(".run-head")
            scroll_to_chart(page)
            recording.screens.append((recording.now(), page.screenshot()))
            if not recording.killed_at and current_iteration(page) >= KILL_AT:
                (worker,) = stack.workers(ROLES)
                os.kill(worker, signal.SIGKILL)
                recording.killed_at = recording.now()
                recording.lines.append((recording.killed_at, f"$ kill -9 {worker}    # the worker that samples and trains"))
            time.sleep(SAMPLE_SECONDS)
        reader.join()
        assert process.returncode == 0, recording.lines
    assert recording.killed_at, "the run ended before its worker was killed"
    settle(page)
    recording.screens.append((recording.now(), page.screenshot()))
    return recording


def current_iteration(page: "Page") -> int:
    head = page.locator(".run-head")
    numbers = re.search(r"iteration (\d+) of", head.inner_text()) if head.count() else None
    return int(numbers[1]) if numbers else 0


def scroll_to_chart(page: "Page") -> None:
    """Scroll until the chart of the reward is below the head."""
    if page.locator(REWARD_CHART).count():
        scroll_below(page, page.locator(REWARD_CHART), ".run-head")


def scroll_below(page: "Page", target: "Locator", head: str) -> None:
    """Scroll until the target is below this head, which stays at the top of the page."""
    element, bottom = target.bounding_box(), page.locator(head).first.bounding_box()
    assert element is not None
    assert bottom is not None
    page.evaluate("pixels => scrollBy(0, pixels)", element["y"] - bottom["y"] - bottom["height"] - 6)


def show_run(film: Film, recording: Recording) -> None:
    """Add the command as it is typed, and the run until its end; the terminal waits a moment at the kill."""
    first, typed = recording.screen(0), list(typing_steps("$ agentrl " + shlex.join(SUBMIT) + " &"))
    for line in typed:
        film.add_split(first, [line], 0.0, TYPING_MS)
    command, end = typed[-1], recording.screens[-1][0]
    film.milliseconds[-1] = 300
    was_killed = False
    for index in range(RUN_FRAMES + 1):
        at = end * index / RUN_FRAMES
        if at >= recording.killed_at and not was_killed:
            was_killed = True
            before = [command, *recording.terminal_lines(recording.killed_at)]
            for line in typing_steps(before.pop()):
                film.add_split(recording.screen(recording.killed_at), [*before, line], recording.killed_at, TYPING_MS)
            film.milliseconds[-1] = 700
        film.add_split(recording.screen(at), [command, *recording.terminal_lines(at)], at)


def typing_steps(line: str, steps: int = 6) -> Iterator[str]:
    """Yield the line as it grows behind the prompt."""
    typed = line.removeprefix("$ ")
    for step in range(steps + 1):
        yield "$ " + typed[: len(typed) * step // steps]


def show_reason(film: Film, recording: Recording, stack: Stack, page: "Page") -> None:
    """Click on the deepest dip after the kill, on the worst episode there, and on `why`."""
    scroll_to_chart(page)
    plot = page.locator(f"{REWARD_CHART} .u-over")
    point = find_dip(stack, page, plot)
    page.mouse.move(*point)
    page.wait_for_timeout(200)
    lines, end = recording.terminal_lines(recording.now()), recording.screens[-1][0]
    film.add_split(open_png(page.screenshot()), lines, end, 800, point)
    page.mouse.click(*point)
    page.wait_for_selector("h1:has-text('Iteration')")
    settle(page)
    film.add(open_png(page.screenshot()), 1000)
    worst = page.locator(".examples li:has-text('worst') a").first
    click(film, page, worst, 800)
    page.wait_for_selector("nav.tabs >> text=why")
    settle(page)
    film.add(open_png(page.screenshot()), 700)
    scroll_below(page, page.locator("nav.tabs"), ".head")
    film.add(open_png(page.screenshot()), 900)
    click(film, page, page.locator("nav.tabs >> text=why").first, 400)
    page.wait_for_selector("h2:has-text('Its advantage')")
    settle(page)
    scroll_below(page, page.locator("nav.tabs"), ".head")
    film.add(open_png(page.screenshot()), 1900)


def click(film: Film, page: "Page", target: "Locator", milliseconds: int) -> None:
    """Add a frame with the pointer on the target, and click it."""
    target.scroll_into_view_if_needed()
    target.hover()
    box = target.bounding_box()
    assert box is not None
    at = (box["x"] + min(60.0, box["width"] / 2), box["y"] + box["height"] / 2)
    film.add(with_pointer(open_png(page.screenshot()), at), milliseconds)
    target.click()


def find_dip(stack: Stack, page: "Page", plot: "Locator") -> Point:
    """Move the pointer to the reward after the kill that is furthest below its neighbours; return its pixel."""
    with stack.database.read() as tx:
        rewards = tx.execute(text("SELECT mean_reward FROM v_iterations ORDER BY iteration")).scalars().all()
    dip = min(range(KILL_AT, len(rewards) - 1), key=lambda at: 2 * rewards[at] - rewards[at - 1] - rewards[at + 1])
    box = plot.bounding_box()
    assert box is not None
    x = box["x"] + box["width"] * dip / (len(rewards) - 1)
    page.mouse.move(x, box["y"] + box["height"] / 2)
    value = plot.locator(".u-cursor-pt").last.bounding_box()
    assert value is not None
    return x, value["y"] + value["height"] / 2


if __name__ == "__main__":
    main()
