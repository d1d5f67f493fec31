"""Every block of PAGES runs, in order, after `make quickstart`, in one folder."""

import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.models.loading import load_tokenizer
from agentrl.workflow.trajectory import Message
from tests.project.documents import DOCS, ROOT
from tests.support import traces
from tests.support.document_blocks import read_blocks, read_commands
from tests.support.document_reader import Reader, Replacement, Rules
from tests.support.scripted_critic import ScriptedCritic, serving
from tests.support.user_shell import UserShell, user_shell

PAGES = (ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("tutorial", "your-agent", "serve", "inspect", "train")))

SETTINGS = {
    "AGENTRL_RUN_MODEL__PATH": "tiny-arithmetic",
    "AGENTRL_RUN_EPOCHS": "1",
    "AGENTRL_RUN_DATASET__MAX_TASKS": "10",
    "AGENTRL_RUN_ROLLOUT__TASKS_PER_ITERATION": "2",
    "AGENTRL_RUN_ROLLOUT__MAX_NEW_TOKENS": "24",
    "AGENTRL_LEASE_SECONDS": "5",
    "AGENTRL_TICK_SECONDS": "0.5",
    "AGENTRL_THREADS": "1",
    "AGENTRL_IDLE_STOP_SECONDS": "3600",
    "COLUMNS": "160",
    "HF_HUB_OFFLINE": "1",
}
"""Settings of the reader. Where a command does not say otherwise, runs are short and have the quickstart's model."""

AS_STORED = " ".join(["env", *(f"-u {name}" for name in SETTINGS if name.startswith("AGENTRL_RUN_"))])
"""What a command begins with that takes no config from the settings."""

CHECKOUT = ("Makefile", "pyproject.toml", "constraints.txt", "quickstart.sh")
"""Files of the checkout that `make quickstart` needs."""

PAIR = """
SELECT a.id, b.id FROM v_episodes AS a JOIN v_episodes AS b ON a.run = b.run AND a.iteration = b.iteration AND a.task = b.task
JOIN v_tool_calls AS c ON c.episode_id = a.id JOIN v_tool_calls AS d ON d.episode_id = b.id
WHERE a.run = 'quickstart' AND a.reward = 1 AND b.reward = 0 AND a.tool_calls = 1 AND b.tool_calls = 1 AND c.result <> d.result
"""
"""Two episodes of a group, of which the first is right, with a tool call each, whose results differ."""

RULES = Rules(
    replaced=(
        Replacement(r"--steps 250", "--steps 120 --learning-rate 5e-3", "half a minute of training"),
        Replacement(r"-n (256|200)\b", "-n 8", "hundreds of episodes"),
        Replacement(r"--max-tasks 64", "--max-tasks 8", "hundreds of episodes"),
        # The run `math` is long enough to be paused before it ends.
        Replacement(r"(--epochs |epochs=)[23]\b(?! --name math)", r"\g<1>1", "hundreds of episodes"),
        Replacement(r"critic: gpt-4o-mini", "rounds: 1\n  critic: gpt-4o-mini", "hundreds of episodes"),
        Replacement(r'"critic": "gpt-4o-mini"', '"critic": "gpt-4o-mini", "rounds": 1', "hundreds of episodes"),
        Replacement(r"^agentrl submit --from-", f"{AS_STORED} agentrl submit --from-", "other settings than the episodes'"),
        Replacement(r"--name (agent|function|program)\b", r"\g<0> --max-tasks 4", "hundreds of episodes"),
        Replacement(r"math@40", "math@4", "a version that a short run has"),
        Replacement(r"\b(4225|301|260|257)\b", "$EPISODE", "an episode has another number in each store"),
        Replacement(r"\b258\b", "$SIBLING", "an episode has another number in each store"),
        Replacement(r"Qwen/Qwen2.5-0.5B(-Instruct)?", "tiny-arithmetic", "a model of the hub"),
        Replacement(r"https://api.openai.com", "$AGENTRL_CRITIC_URL", "a service on the internet"),
        Replacement(r"^agentrl ui", "agentrl ui --no-browser --port 0", "a port that may be in use"),
        Replacement(r"^agentrl serve", "agentrl serve --port $PORT", "a port that may be in use"),
        Replacement(r"127.0.0.1:8000", "127.0.0.1:$PORT", "a port that may be in use"),
        Replacement(r"^curl", "curl --fail-with-body", "a refused request is a failure"),
    ),
    not_run={
        r"^make test": "it runs this test",
        r"^pip install": "it installs from the package index",
        r"^agentrl/ ": "a drawing, which test_readme.py checks",
    },
    stays_up={r"^agentrl ui": "/", r"^agentrl serve": "/v1/models"},
    varying={
        r"^ {4}\S|^> |^(  )?-?> |What is|^  first: ": "texts of the task and the model",
        r"^\s*(answer|reference|expression):": "texts of the task and the model",
        r"^\s*[\d.]* \||^\s*\+-": "plots",
        r"of the first and the last": "a short run has fewer iterations",
        r"^iteration  planned": "a column for each reason not to train, if there is one",
    },
)  # fmt: skip


def test_document_block_rules_each_match() -> None:
    blocks = [block for page in PAGES for block in read_blocks(page)]
    commands = [command.text for block in blocks if block.language in ("sh", "console") for command in read_commands(block)]
    texts = [(ROOT / "quickstart.sh").read_text(), *(block.text for block in blocks), *commands]
    patterns = RULES.patterns()
    assert [pattern for pattern in patterns if not any(re.search(pattern, text, re.MULTILINE) for text in texts)] == []


@pytest.fixture(scope="module")
def shell(module_folder: Path, forked_programs_of_module: None) -> Iterator[UserShell]:
    """The shell of a reader who has gsm8k's files and a critic, in a folder with the files of the quickstart."""
    module_folder.chmod(0o755)  # the sandbox's user reads the folder of an agent
    gsm8k = module_folder / "gsm8k"
    gsm8k.mkdir()
    sums = [{"question": f"What is {a} plus 3?", "answer": f"<<{a}+3={a + 3}>>{a + 3}\n#### {a + 3}"} for a in range(8)]
    for split in ("train", "test"):
        (gsm8k / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    own = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}
    with serving(ScriptedCritic()) as url:
        settings = {**SETTINGS, "AGENTRL_GSM8K_DIR": str(gsm8k), "AGENTRL_CRITIC_URL": url, "AGENTRL_CRITIC_KEY": "..."}
        with user_shell(module_folder, {**own, **settings}) as made:
            for name in CHECKOUT:
                shutil.copy(ROOT / name, made.folder / name)
            (made.folder / ".venv" / ".stamp").touch()  # the environment is there
            yield made
            made.run("agentrl down")


@pytest.fixture(scope="module")
def reader(shell: UserShell) -> Reader:
    """A reader who has run `make quickstart`."""
    script = shell.folder / "quickstart.sh"
    script.write_text(RULES.substitute(script.read_text()))
    done = shell.run("make quickstart")
    assert done.code == 0, done.output
    with sqlite3.connect(shell.folder / ".agentrl" / "agentrl.db") as store:
        episode, sibling = store.execute(PAIR).fetchone()
    shell.environment |= {"EPISODE": str(episode), "SIBLING": str(sibling), "PORT": str(_free_port())}
    _write_traces(shell.folder)
    return Reader(shell, replace(RULES, ran={r"^make quickstart": done.output, r"^== before": done.output}))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _write_traces(folder: Path) -> None:
    """Write the traces of another system that the reader has: a rollout of each of two tasks, and a trace without a model."""
    chat = Chat(load_tokenizer(folder / ".agentrl" / "models" / "tiny-arithmetic"))
    questions = [Message("user", text) for text in ("What is 2 plus 3?", "What is 3 plus 2?")]
    spans = [each for trace, question in enumerate(questions, 1) for each in traces.rollout(chat, trace, 1.0, question)]
    traces.write(folder / "traces.jsonl", [*spans, traces.span(900, "ping", {}, trace=3)])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_document_blocks_run(reader: Reader, page: Path) -> None:
    failures = reader.read(read_blocks(page))
    assert not failures, "\n\n".join(failures)


def read_text(shell: UserShell, text: str) -> list[str]:
    """Return the failures of a document with that text."""
    page = shell.folder / "made_up.md"
    page.write_text(text)
    return Reader(shell, Rules()).read(read_blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("```sh\nno-such-command\n```\n", "made_up.md:2: no-such-command: exit 127"),
        ("```python\nimport no_such_module\n```\n", "made_up.md:2: python block_2.py: exit 1"),
        ("```ruby\nputs 1\n```\n", "made_up.md:2: a block of ruby cannot be run"),
        ("```text\nabout 3 s\n```\n", "made_up.md:2: no command prints this text"),
        ("```console\n$ echo one\ntwo\n```\n", "made_up.md:2: this line is not printed: two"),
        ("```sh\nagentrl events demo\n```\n", "There is no run 'demo'"),
        ("```sh\nagentrl submit --config run.yaml\n```\n", "run.yaml"),
        ("```yaml\n# run.yaml\nepochs: 1\n```\n", "made_up.md:2: no block below uses run.yaml"),
        ("```sh\nexit 3\n```\n", "made_up.md:2: exit 3: exit 3"),
    ],
    ids=["command", "script", "language", "text", "output", "run", "file", "unused file", "exit code"],
)
def test_block_reader_reports_failed_block(shell: UserShell, text: str, failure: str) -> None:
    (reported,) = read_text(shell, text)
    assert failure in reported


@pytest.mark.slow
def test_block_reader_accepts_error_shown_in_document(shell: UserShell) -> None:
    error = "agentrl: There is no run 'demo'.\n  List them with `agentrl runs`."
    assert read_text(shell, f"```console\n$ agentrl events demo\n{error}\n```\n") == []


@pytest.mark.slow
def test_shell_kills_command_that_takes_too_long(shell: UserShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process outlives its test, and Python's warning of it fails a later one."""
    monkeypatch.setattr("tests.support.user_shell.SECONDS", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        shell.run("echo $$ >pid; sleep 600; true")
    pid = (shell.folder / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_block_reader_keeps_variables_and_files(shell: UserShell) -> None:
    later = "```console\n$ cat word.txt; echo $WORD\none\ntwo\n```\n"
    assert read_text(shell, f"```sh\nexport WORD=two\necho one > word.txt\n```\n\n{later}") == []
