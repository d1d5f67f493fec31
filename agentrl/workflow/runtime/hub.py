"""Asks the hub once, without retries, whether it knows a name: its own client would retry for half a minute."""

from typing import Literal

SECONDS = 5.0


def ask_hub(kind: Literal["model", "dataset"], name: str) -> Literal["known", "unknown", "away"]:
    """Whether the hub knows a model or dataset of that name; `away` if it does not answer."""
    from huggingface_hub import HfApi  # slow to import, and seldom needed
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    api = HfApi()
    try:
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=SECONDS)
    except (RepositoryNotFoundError, HFValidationError):
        return "unknown"
    except Exception:  # noqa: BLE001 - no network, offline mode, no answer: each transport has its own
        return "away"
    return "known"


def go_offline() -> None:
    """Limits this process to files that were fetched before. Call it before `datasets` is imported."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
