# /// script
# dependencies = ["mini-swe-agent==2.4.6"]
# ///
"""mini-swe-agent: its command line with its own configuration runs a command and submits."""

import json
import os
import subprocess
import sys
from pathlib import Path

from scenario import MODEL, report

SETTINGS = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def mini(question: str, *more: str) -> str:
    program, record = Path(sys.executable).with_name("mini"), Path("record.json")
    words = [str(program), "--yolo", "--exit-immediately", "-m", f"openai/{MODEL}", "-t", question, "-o", str(record), *more]
    subprocess.run(words, env=os.environ | SETTINGS, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
    return json.loads(record.read_text())["info"]["submission"].strip()


def responses(question: str) -> str:
    return mini(question, "--model-class", "litellm_response")


report(mini, responses)
