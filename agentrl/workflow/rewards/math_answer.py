r"""math_answer: 1.0 if the final answer equals the reference mathematically, as math-verify decides, else 0.0.

`\frac{1}{2}`, `0.5` and `50\%` are equal, and so are `x + 1` and `1 + x`. Intervals, sets, matrices and equations are compared
as such. The answer is the text after the last `####` of the last turn. Without `####`, the answer is what math-verify finds:
the last box, a sentence about the final answer, or the last formula. A turn that called a tool, or was cut off at a limit, is
not an answer. For plain numbers, `numeric_answer` is enough.

This reward is a `Judge`: math-verify parses model-written text, so it runs in the sandbox. Of the Python packages on this
machine, the sandbox sees only those of the extra `math`; a docker image must contain them itself. Loading the packages takes a
second, so each core has a lasting session. Each answer is judged in a fork of a session, and the fork then ends. An answer that
exceeds its time or memory there counts as wrong.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.workflow.errors import ConfigError, SandboxUnavailable, ToolFailure
from agentrl.workflow.installation import install_command
from agentrl.workflow.judging import code_judge
from agentrl.workflow.rewards import Judge
from agentrl.workflow.rewards.tests_passed import JUDGE_SECONDS, verdict_result, writable
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.runtime.warm_processes import Warm
from agentrl.workflow.sandbox import Limits, Session, exact_json
from agentrl.workflow.tools.python import SANDBOX, sandbox
from agentrl.workflow.trajectory import Episode, ToolResult

PACKAGES = ("math_verify", "latex2sympy2_extended", "sympy", "mpmath", "antlr4")
ASKED_FOR = "antlr4-python3-runtime"
"""The distribution whose metadata the sandbox must see, because latex2sympy2 looks up its version."""
INSTALL_IN_IMAGE = "pip install math-verify"

LIMITS = Limits(cpu_seconds=3.0)
LOADING = Limits(cpu_seconds=60.0)
"""The limits for loading the packages. They are generous, because a Python of another version first compiles the packages."""
MAX_CHARACTERS = 20_000
VERDICTS = {"1.0": 1.0, "0.0": 0.0, "null": None}
"""A mapping from each text that the judge may return to its value."""

PATHS = """
import os, sys, tempfile

# Links to the packages: Landlock lets nobody list the folder that holds them, and an import by name must list one.
links = tempfile.mkdtemp()
for path in {paths!r}:
    os.symlink(path, os.path.join(links, os.path.basename(path)))
sys.path.append(links)
"""
INSIDE = """
import logging
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.disable()  # of times that it does not limit: the sandbox does
TARGETS = [LatexExtractionConfig(), ExprExtractionConfig()]


def read(text):
    return parse(text, TARGETS, parsing_timeout=None)


def marked(text):
    _, mark, answer = text.rpartition("####")
    return (mark, answer.strip().partition("\\n")[0].strip() if mark else text.strip())


def bare(text):
    text = text.replace("\\\\$", "")  # a sign of money
    text = text.replace("$", "") if text.count("$") == 1 else text
    return read(text if "$" in text or "\\\\boxed" in text or "\\\\(" in text or "\\\\[" in text else f"${text}$") or read(text)


def judge(reference, answer):
    gold = bare(marked(reference)[1])
    if not gold:
        return None
    mark, said = marked(answer)
    return float(verify(gold, bare(said) if mark else read(said), timeout_seconds=None))


# What the parser learns of the grammar lasts, and is five times as fast then.
for known in ("1,200.5", "\\frac{-3}{4}\\%", "x = 2\\sqrt{3} + \\pi", "(1, 2]", "\\{1, x^2\\}"):
    judge(known, f"It is \\boxed{{{known}}}.")
"""


def asked(episode: Episode) -> Mapping[str, Any] | float:
    """Return the judge's arguments for the episode, or the reward 0.0 if there is no answer."""
    answer = episode.final_answer[-MAX_CHARACTERS:]
    if episode.stop_reason != "answered" or not writable(answer):
        return 0.0
    return {"reference": episode.task.reference, "answer": answer}


def _math_answer(reference: str, answer: str) -> ToolResult:
    """Judge whether the answer equals the reference."""
    right, cpu_seconds = _judged(reference, answer)()
    if right is None:
        raise ToolFailure(f"the reference {reference!r:.80} contains no mathematical expression")
    return verdict_result(right, cpu_seconds)


@lru_cache(maxsize=4096)
def _judged(reference: str, answer: str) -> Once[tuple[float | None, float]]:
    """Return a function that judges the answer once and caches the result."""

    def judge() -> tuple[float | None, float]:
        result = code_judge.asked("judge", exact_json.encode([reference, answer]), _warm, LIMITS)
        return (VERDICTS.get(result.value, 0.0) if result.status == "ok" else 0.0), result.cpu_seconds

    return Once(judge)


def _opened() -> Session:
    place = sandbox()
    reads = () if place.kind == "docker" else installed()
    session = place.session(LOADING, reads)
    result = session.run(PATHS.format(paths=reads) + INSIDE)
    if result.status != "ok":
        session.close()
        reason = f"{result.status}: {' '.join(result.output.split())[-300:]}"
        message = f"math-verify cannot be loaded in the sandbox ({result.kind}): {reason}"
        raise SandboxUnavailable(message, _hint(result.kind, reads))
    return session


def _hint(kind: str, reads: Sequence[str]) -> str:
    """Return the hint for packages that are installed on this machine but cannot be loaded in the sandbox."""
    if kind == "docker":
        return f"Install math-verify in the image that AGENTRL_SANDBOX_IMAGE names: {INSTALL_IN_IMAGE}"
    folders = ", ".join(sorted({str(Path(path).parent) for path in reads}))
    readable = f"The packages are in {folders}: make these folders readable for every user."
    return f"{readable} `agentrl doctor` shows the Python inside the sandbox."


def installed() -> tuple[str, ...]:
    """Return the folders of the packages. Raise ConfigError if a package is not installed."""
    specs = [find_spec(name) for name in PACKAGES]
    folders = [folder for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    if not all(specs):
        raise ConfigError("The reward math_answer needs math-verify, which is not installed.", install_command("math"))
    return (*folders, *(str(Path(file.locate()).parent) for file in metadata.files(ASKED_FOR) or () if file.name == "METADATA"))


def ready() -> None:
    """Check that answers can be judged on this machine. The check raises the same errors as the first judged answer."""
    with _warm.one():
        pass


_warm = Warm(_opened)
_math_answer.__name__ = "math_answer"
math_answer = Judge(
    _math_answer,
    timeout_seconds=JUDGE_SECONDS,
    needs=ready,
    opens=ready,
    asks=asked,
    reference_form="#### {}",
    variables=SANDBOX,
)
