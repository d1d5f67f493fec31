"""Requests to the Hugging Face hub with a time limit. Without a limit, the hub's client retries for half a minute, and longer
if the name server does not respond.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Literal, TypeVar

Answer = TypeVar("Answer")

ANSWER_SECONDS = 3.5
"""The longest wait for a response, in seconds."""
AWAY_SECONDS = 10.0
"""The time for which no request is sent to a hub that did not respond, in seconds. So a command with two names waits only once.
"""

_silent_since = -AWAY_SECONDS


def ask_hub(kind: Literal["model", "dataset"], name: str) -> Literal["known", "unknown", "away"]:
    """Ask the hub for a model or dataset: `known`, `unknown`, or `away` if the hub does not respond."""
    from huggingface_hub import HfApi  # slow to import, and seldom needed
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    api = HfApi()

    def ask() -> Literal["known", "unknown", "away"]:
        try:
            (api.model_info if kind == "model" else api.dataset_info)(name, timeout=ANSWER_SECONDS)
        except (RepositoryNotFoundError, HFValidationError):
            return "unknown"
        except HfHubHTTPError as error:
            if error.response is None:
                raise
            return "away"  # it answers, but not this question: the next one is asked
        return "known"

    global _silent_since
    if monotonic() - _silent_since < AWAY_SECONDS:
        return "away"
    answer = answer_in_time(ask)
    if answer is None:
        _silent_since = monotonic()
    return answer or "away"


def answer_in_time(ask: Callable[[], Answer]) -> Answer | None:
    """Call `ask` in a thread and return its result; None if it raises an exception or takes longer than `ANSWER_SECONDS`."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):  # no network, offline mode, no answer: each transport has its own
            answers.append(ask())

    asking = threading.Thread(target=run, daemon=True)  # a name server's silence cannot be interrupted, so it is left behind
    asking.start()
    asking.join(ANSWER_SECONDS)
    return answers[0] if answers else None


def go_offline() -> None:
    """Limit this process to files that are already downloaded. Call this function before `datasets` is imported."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def has_fetched_dataset(name: str) -> bool:
    """Return True if the cache of `datasets`, or of the hub's client, has files of the dataset."""
    from huggingface_hub import constants

    prepared = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets")), name.replace("/", "___"))
    return prepared.is_dir() or Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}").is_dir()
