"""A program as an agent in the sandbox of the containers: reads its task, asks the model, prints the answer."""

import json
import os
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path

assert [path.name for path in Path.home().iterdir()] == ["task.json"], "a new folder is its home"
assert not [name for name in os.environ if "PASSWORD" in name or "DATABASE" in name or "BROKER" in name]
with suppress(OSError):
    raise AssertionError(Path("/proc/1/environ").read_bytes())
for host, port in (("redis", 6379), ("postgres", 5432), ("1.1.1.1", 443)):
    with suppress(OSError):
        socket.create_connection((host, port), timeout=5)
        raise AssertionError(f"it reached {host}")

with open(os.environ["AGENTRL_TASK"]) as file:
    task = json.load(file)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}).encode()
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["choices"][0]["message"].get("content"))
