"""A program as an agent: reads its task, asks the model, writes the answer."""

import json
import os
import urllib.request

with open(os.environ["AGENTRL_TASK"]) as file:
    task = json.load(file)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}).encode()
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["choices"][0]["message"].get("content"))
