"""An agent that asks three times and takes its time in between, so that something can happen meanwhile: a function, and a
program.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

TURNS = 3
PAUSE_SECONDS = 0.3
RETRIES = 20


def solve(task: Any, llm: Any) -> None:
    """A conversation of three turns."""
    messages = list(task.messages)
    for _ in range(TURNS):
        messages.append({"role": "assistant", "content": _ask(llm, messages)})
        messages.append({"role": "user", "content": "And then?"})
        time.sleep(PAUSE_SECONDS)


def _ask(llm: Any, messages: Any) -> str:
    """The model's next words; a broken connection is tried again, as clients do it, who say how often they tried."""
    body = json.dumps({"model": llm.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    for tried in range(RETRIES):
        try:
            asked = Request(f"{llm.base_url}/chat/completions", body, {**headers, "X-Stainless-Retry-Count": str(tried)})
            with urlopen(asked, timeout=120) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"] or "")
        except HTTPError as error:
            if error.code not in (429, 503):
                raise
        except (URLError, OSError, ValueError):
            pass
        time.sleep(0.2 + 0.2 * tried)
    raise TimeoutError("nobody answers")


if __name__ == "__main__":
    variables = {name: os.environ[f"OPENAI_{name.upper()}"] for name in ("base_url", "api_key", "model")}
    solve(SimpleNamespace(**json.loads(Path(os.environ["AGENTRL_TASK"]).read_text())), SimpleNamespace(**variables))
