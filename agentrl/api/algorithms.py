"""`GRPO(model, tokenizer)` and `PPO(...)`: an algorithm with its model and options, for a Trainer or for your own training
loop.

  grpo = agentrl.GRPO(model, tokenizer, lora_r=8, learning_rate=1e-4)
  agentrl.Trainer(grpo).fit(rows)  # a run in the store
  with grpo.open() as policy:  # or a loop in this process
      trainer = agentrl.GRPOTrainer(policy, grpo)

A model in memory is saved once, in a folder that is named by the hash of the model's content. It is then loaded from this
folder, and the object in memory is not changed.
"""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.api.options import keys_of
from agentrl.workflow.config import build
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.settings import settings

if TYPE_CHECKING:
    from agentrl.workflow.inference.open_policy import OpenPolicy


class GRPO:
    """GRPO with its options and, optionally, its model.

    Args:
        model: a transformers model in memory, or the name or folder of a model, as in the Trainer.
        tokenizer: the tokenizer of a model in memory, with its chat template.
        options: any key of the config, as in the Trainer: `lora_r=8`, `clip_high=0.28`.

    Raises:
        ConfigError: an option does not exist.
        ModelError: the model has no tokenizer, or cannot be saved completely.
    """

    NAME: ClassVar[str] = "grpo"

    def __init__(self, model: Any = None, tokenizer: Any = None, **options: Any) -> None:
        """Validate the arguments. The model is saved later, when it is first needed."""
        if model is not None and not isinstance(model, str | Path):
            _check(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self._keys = keys_of(options)

    def keys(self, models: Path) -> dict[str, Any]:
        """Return the config keys of this algorithm. A model in memory is saved in the folder `models`.

        Raises:
            ModelError: the model cannot be saved.
        """
        keys = {"algorithm.name": self.NAME, **self._keys}
        if self.model is None:
            return keys
        is_named = isinstance(self.model, str | Path)
        return keys | {"model.path": str(self.model if is_named else save_model(self.model, self.tokenizer, models))}

    def open(self, **limits: Any) -> "OpenPolicy":
        """Load the model and start its sampler, as `open_policy` does.

        Args:
            limits: options of the config's section `rollout`: `max_new_tokens`, `temperature` and the like.

        Raises:
            ConfigError, ModelError: as `open_policy`.
        """
        from agentrl.workflow.inference.open_policy import open_policy

        config = build(self.keys(settings().models_dir))
        return open_policy(config, seed=config.seed, **limits)

    def __repr__(self) -> str:
        return f"<{self.NAME}{' of a model in memory' if hasattr(self.model, 'save_pretrained') else ''}>"


class PPO(GRPO):
    """PPO with its options and, optionally, its model. PPO also trains a critic."""

    NAME = "ppo"


def keys_of_algorithm(algorithm: str | GRPO | type[GRPO], models: Path) -> dict[str, Any]:
    """Return the config keys of an algorithm. `algorithm` is a name, an object `GRPO(...)` or `PPO(...)`, or the class of one.

    Raises:
        ModelError: the model inside the object cannot be saved in the folder `models`.
    """
    if isinstance(algorithm, str):
        return {"algorithm.name": algorithm}
    return (algorithm() if isinstance(algorithm, type) else algorithm).keys(models)


def save_model(model: Any, tokenizer: Any, models: Path) -> Path:
    """Return the folder with the model and tokenizer. Write the folder if it does not exist.

    Args:
        models: the parent folder. The folder of the model is named by the hash of its content.

    Raises:
        ModelError: the files cannot be written.
    """
    models.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".given-", dir=models))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        folder = models / f"given-{base_hash(temporary)[:16]}"
        if not folder.exists():
            temporary.chmod(0o755)
            temporary.rename(folder)
    except OSError as error:
        raise ModelError(f"The model cannot be saved in {str(models)!r}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
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
