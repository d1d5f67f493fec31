"""Algorithms with a model from memory. The model is saved once, by its hash, and trained from that folder."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from agentrl.api.options import keys_of
from agentrl.workflow.errors import ModelError
from agentrl.workflow.settings import Settings


class GRPO:
    """GRPO with its options and, optionally, a model in memory: `Trainer(algorithm=GRPO(model, tokenizer))`.

    Args:
        model: a transformers model in memory, which stays as it is; or a name or a folder, as in the Trainer.
        tokenizer: the model's, with its chat template.
        options: any key of the config, as in the Trainer: `lora_r=8`, `clip_high=0.28`.

    Raises:
        ConfigError: there is no such option.
        ModelError: a model without a tokenizer, or one that cannot be saved whole.
    """

    NAME: ClassVar[str] = "grpo"

    def __init__(self, model: Any = None, tokenizer: Any = None, **options: Any) -> None:
        """Check them; nothing is saved yet."""
        if model is not None and not isinstance(model, str | Path):
            _check(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self._keys = keys_of(options)

    def keys(self, where: Settings) -> dict[str, Any]:
        """Save the model if it is new, and return the config keys of this algorithm.

        Raises:
            ModelError: it cannot be saved.
        """
        found = {"algorithm.name": self.NAME, **self._keys}
        if self.model is None:
            return found
        is_named = isinstance(self.model, str | Path)
        return found | {"model.path": str(self.model if is_named else saved(self.model, self.tokenizer, where.models_dir))}

    def __repr__(self) -> str:
        return f"<{self.NAME}{' of a model in memory' if hasattr(self.model, 'save_pretrained') else ''}>"


class PPO(GRPO):
    """PPO with its options and, optionally, a model in memory. It also trains a critic."""

    NAME = "ppo"


def saved(model: Any, tokenizer: Any, models: Path) -> Path:
    """Return the folder with the model and tokenizer; write it if it does not exist.

    Args:
        models: where it lies, under a name of its content's hash.

    Raises:
        ModelError: the disk refused, or it holds no weights that can be saved.
    """
    from agentrl.workflow.models.lookup import base_hash

    models.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".given-", dir=models))
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        folder = models / f"given-{base_hash(beside)[:16]}"
        if not folder.exists():
            beside.chmod(0o755)
            beside.rename(folder)
    except OSError as error:
        raise ModelError(f"The model cannot be saved in {str(models)!r}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _check(model: Any, tokenizer: Any) -> None:
    kind = type(model).__name__
    if not callable(getattr(model, "save_pretrained", None)) or not hasattr(model, "config"):
        raise ModelError(f"A {kind} is not a transformers model.", "Pass a model, its name or its folder.")
    if getattr(model, "peft_config", None):
        raise ModelError(f"The {kind} has adapters, which cannot be the base of training.", "Pass model.merge_and_unload().")
    if getattr(model, "quantization_method", None) or getattr(model, "is_quantized", False):
        raise ModelError(f"The {kind} is quantised.", "Pass the full-precision model and load_in_4bit=True.")
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ModelError("A model in memory needs its tokenizer.", "Write GRPO(model=model, tokenizer=tokenizer).")
