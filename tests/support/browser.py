"""A real Chromium, the distribution's, and the page's service as a process of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_SECONDS = 30.0
ADDRESS = re.compile(r"http://\S+?:(\d+)/(?:\?token=\S+)?")


@contextmanager
def chromium() -> "Iterator[Browser]":
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        missing("Chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class Service:
    """`agentrl ui` over a data folder."""

    def __init__(self, home: Path, *options: str, port: int = 0, **environment: str) -> None:
        self.environment = {**os.environ, "AGENTRL_HOME": str(home), "PYTHONUNBUFFERED": "1", **environment}
        self.options = options
        self.start(port)

    def start(self, port: int) -> None:
        """Starts it, and waits until it says where it is."""
        command = [sys.executable, "-m", "agentrl.cli", "ui", "--no-browser", "--port", str(port), *self.options]
        self.process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if found := ADDRESS.search(line):
                self.url, self.port = found[0], int(found[1])
                return
        raise AssertionError(f"agentrl ui ended: {said}")

    def stop(self, number: int = signal.SIGINT) -> int:
        """Ends it; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(START_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def service(home: Path, *options: str, **environment: str) -> Iterator[Service]:
    """The page's service, ended at the end."""
    made = Service(home, *options, port=0, **environment)
    try:
        yield made
    finally:
        made.stop(signal.SIGKILL)


class Watched:
    """A page of the browser, with everything that went wrong in it."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.wrong: list[str] = []
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2] if "//" in request.url else ""))
        self.hosts: set[str] = set()

    def _dismiss(self, dialog: "Dialog") -> None:
        self.wrong.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def see(self, text: str, seconds: float = 15.0) -> None:
        """Waits until the page shows the text."""
        self.page.wait_for_function("text => document.body.innerText.includes(text)", arg=text, timeout=1000 * seconds)


def settle(page: "Page") -> None:
    """Waits until nothing is read any more."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if page.evaluate(
            "!document.querySelector('.waits') && !/reading/i.test(document.querySelector('main')?.innerText || '')"
        ):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"still reading: {page.inner_text('main')[:300]}")
