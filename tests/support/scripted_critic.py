"""A critic by script, over real HTTP: it reads of an episode what is missing, and often advises what helps; or it is blind."""

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RULES = {"works": "Think step by step.", "computes": "Use the calculator.", "ends": "End with the number."}
"""Part of the reward -> the advice that brings it."""
OTHER_ADVICE = [f"Remember rule {number}." for number in range(300)]


class ScriptedCritic:
    """What it answers depends on the question and on how often it came, so that it is the same after a kill.

    Args:
        mode: informed, blind (it reads no episode), or what it says instead of an answer.
    """

    def __init__(self, mode: str = "informed", seed: int = 0) -> None:
        self.mode, self.seed, self.asked = mode, seed, list[str]()
        self._lock = threading.Lock()

    def answer(self, prompt: str) -> str:
        with self._lock:
            draw = random.Random(f"{self.seed} {self.asked.count(prompt)} {prompt}")
            self.asked.append(prompt)
        if self.mode not in ("informed", "blind"):
            return self.mode
        if critique := re.search(r"<critique>\n(.*?)\n</critique>", prompt, re.DOTALL):
            before = re.search(r"<prompt>\n(.*?)\n</prompt>", prompt, re.DOTALL)
            assert before is not None
            return f"Here it is: <prompt>{before[1]} {critique[1]}</prompt>"
        missing = [advice for part, advice in RULES.items() if re.search(rf"^{part} 0$", prompt, re.MULTILINE)]
        good = self.mode == "informed" and missing and draw.random() < 0.5
        said = draw.choice(missing) if good else draw.choice(OTHER_ADVICE)
        if current := re.search(r"```\n(.*?)\n```", prompt, re.DOTALL):  # as GEPA asks
            return f"```\n{current[1]} {said}\n```"
        return said


@contextmanager
def serving(critic: ScriptedCritic) -> Iterator[str]:
    """Its URL, while it serves."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *said: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = critic.answer(body["messages"][0]["content"])
            data = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ruled_parts(prompt: str) -> dict[str, float]:
    """What a scripted agent earns that follows its prompt: a part for each rule in it."""
    return {part: float(advice in prompt) for part, advice in RULES.items()}
