"""The lookup of models by name: the folder of a model's files, their hash, and the LoRA rank. It loads no weights, and needs no
torch.

A model is a folder in the hub's format: `config.json`, `*.safetensors`, tokenizer files. A name is one of:

- `tiny`, which `agentrl sft` makes
- a folder in the models directory
- a path
- a name on the hub
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.workflow.checkpoints import RECORD, sha256_file
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.dataset_rows.sources import kind_of_source
from agentrl.workflow.errors import ConflictError, ModelError
from agentrl.workflow.models.gguf_files import SUFFIX, folder_of_gguf
from agentrl.workflow.models.headers import (
    MAX_CONFIG_BYTES,
    ModelFiles,
    Shapes,
    check_files,
    check_layers,
    checked_shape,
    read_config,
    read_model_files,
    read_shapes,
)
from agentrl.workflow.plugins import find
from agentrl.workflow.runtime import hub
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import PolicyRef

ADAPTER_CONFIG = "adapter_config.json"
TINY = "tiny"
TINY_DATASET = "arithmetic"
"""The dataset whose tiny model the name `tiny` means if no dataset is given."""
SMALL = 50_000_000
"""The number of parameters below which all weights train, unless the config sets a rank."""
TRUST = "Read the code, and pass --trust-remote-code if it may run here."
MAX_FILE_BYTES = 1 << 43
"""The largest file of weights on the hub that is accepted, in bytes."""
_FETCH_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja")
_TRAIN_TINY = "agentrl sft --dataset arithmetic --model tiny, then"
TINY_HINT = f"{_TRAIN_TINY} pass --model tiny-arithmetic"
HUB_HINT = (
    "Pass a local model folder. Or train a small model, which needs no hub: "
    f"{_TRAIN_TINY} submit --dataset arithmetic --model tiny"
)
_TEXT_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def resolve_model(name: str, dataset: str) -> str:
    """Return the folder or the hub name that a model's name means for runs on the dataset. Convert a GGUF file to a folder.

    Raises:
        ModelError: the tiny model for this dataset does not exist yet, or a GGUF file is not a valid model.
        ConfigError: the dataset does not exist.
    """
    folder = settings().models_dir / (sft_model_name(name, dataset) if name == TINY else name)
    if (folder / "config.json").is_file():
        return str(folder.resolve())
    if name == TINY:
        raise _no_tiny(dataset)
    if name.endswith(SUFFIX):
        return str(folder_of_gguf(Path(name).expanduser()))
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().is_dir() else name


def starting_policy(name: str, dataset: str) -> PolicyRef:
    """Return the `PolicyRef` of an untrained base.

    Raises:
        ModelError: the folder does not exist, or the hub has no such model.
    """
    return untrained_policy(existing_model(name, dataset))


def untrained_policy(base: str) -> PolicyRef:
    """Return the `PolicyRef` of a base that `existing_model` returned. A local folder is hashed now. A hub model is hashed when
    a worker first loads it.
    """
    return PolicyRef(base, base_hash(Path(base)) if Path(base).is_dir() else "")


def existing_model(name: str, dataset: str) -> str:
    """Return the result of `resolve_model` after checking that the folder or hub model exists.

    Raises the exceptions of `starting_policy`.
    """
    base = resolve_model(name, dataset)
    folder = Path(base)
    if not folder.is_dir():
        if folder.is_absolute() or base.startswith("."):
            raise ModelError(f"There is no model in {base!r}.", "Pass a folder in the hub's format, a hub name, or tiny.")
        check_on_hub(base)
    return base


def _no_tiny(dataset: str) -> ModelError:
    problem = f"The tiny model for {dataset!r} does not exist yet"
    kind = kind_of_source(dataset)
    if kind != "plugin" or "," in dataset:
        train = f"Train it on its answers: agentrl sft --dataset {dataset} --model tiny. "
        own = train if "," not in dataset and (kind == "hub" or Path(dataset).exists()) else ""
        return ModelError(f"{problem}.", f"{own}{'Or train' if own else 'Train'} another's: {TINY_HINT}")
    if find("datasets", dataset).demonstrations is not None:
        return ModelError(f"{problem}.", f"Train it: agentrl sft --dataset {dataset} --model tiny")
    return ModelError(
        f"{problem}, and the dataset has no demonstrations to train it on.",
        f"Train another: {TINY_HINT}",
    )


def sft_model_name(model: str, dataset: str) -> str:
    """Return the default name of a model that `agentrl sft` makes, such as `tiny-arithmetic`."""
    return f"{Path(model).name}-{Path(dataset).stem}"


def refuse_existing(target: Path, overwrite: bool, how: str = "Pass --force") -> None:
    """Raise ConflictError if the folder exists and must not be overwritten.

    An existing folder is overwritten only with `overwrite`, and only if it contains a `RECORD`.

    Args:
        how: the advice in the error's hint on how to overwrite the folder.
    """
    if not target.exists():
        return
    if not overwrite:
        hint = f"{how} to replace it, or choose another folder or name."
        raise ConflictError(f"{str(target)!r} already contains a model.", hint)
    if not (target / RECORD).is_file():
        raise ConflictError(f"{str(target)!r} was not made by agentrl (it holds no {RECORD}).", "Pass another folder.")


def code_files(folder: Path) -> tuple[Path, ...]:
    """Return the code files in a model's folder.

    The result is empty unless the config of the model or the tokenizer names such a file.
    """
    modules = {name for config in ("config.json", "tokenizer_config.json") for name in _named_modules(folder / config)}
    there = tuple(sorted(folder.glob("*.py")))
    return there if modules & {file.stem for file in there} else ()


def _named_modules(file: Path) -> Iterator[str]:
    """Yield the modules that `auto_map` names (`modeling_x` in `modeling_x.Model`).

    An entry of `auto_map` is a name or a list of names.
    """
    try:
        with file.open("rb") as stream:
            tree = json.loads(stream.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return  # loading it reports the error
    entries = tree.get("auto_map") if isinstance(tree, dict) else None
    for value in entries.values() if isinstance(entries, dict) else ():
        for name in value if isinstance(value, list) else (value,):
            if isinstance(name, str):
                yield name.rpartition("--")[2].partition(".")[0]


def check_folder(config: ModelConfig, folder: Path) -> None:
    """Check that a model's folder may be loaded, without loading it.

    Raises:
        ModelError: a file cannot be read, is too large or has absurd sizes (`check_files`, `check_layers`); an adapter is
            beside the model; or the model has code of its own, and the config does not trust this code.
    """
    check_files(folder)
    if any(folder.glob("*.safetensors")):
        check_layers(folder)
    if (folder / ADAPTER_CONFIG).exists():
        problem = f"The folder {str(folder)!r} has a LoRA adapter beside the model, which transformers would load with it"
        raise ModelError(f"{problem}.", f"Move {ADAPTER_CONFIG} to another folder.")
    code = code_files(folder)
    if code and not config.trust_remote_code:
        raise ModelError(f"The model in {str(folder)!r} needs its own code ({code[0].name}).", TRUST)


def check_size(folder: Path, bits: int, memory_bytes: int, device: str) -> None:
    """Raise ModelError if the folder's weights, with `bits` bits per number, exceed the memory of `device`: the system would
    kill the process that loads them.
    """
    needed = sum(map(prod, read_shapes(folder).values())) * bits // 8
    if needed > memory_bytes:
        sizes = f"needs {needed / 2**30:,.1f} GiB for its weights; {device} has {memory_bytes / 2**30:,.1f} GiB"
        raise ModelError(f"The model in {str(folder)!r} {sizes}.", "Pass a smaller model, or set model.load_in_4bit=true.")


def quantised_bits(config: ModelConfig) -> int:
    """Return the bits of a weight of a quantised model; 0 if the model is not quantised."""
    return 4 if config.load_in_4bit else 8 if config.load_in_8bit else 0


def code_hash(folder: Path) -> str:
    """Return the sha256 over the code files in a model's folder; empty if there are no code files."""
    lines = [f"{file.name} {sha256_file(file)}" for file in code_files(folder)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def model_folder(path: str, code: bool = False) -> Path:
    """Return the local folder of a model, downloaded from the hub if needed.

    Args:
        code: whether the model's own code may run; the code is then downloaded too.

    Raises:
        ModelError: the folder does not exist or has no config, the hub has no such model, or the hub cannot be reached.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ModelError(f"The folder {path!r} holds no config.json.", HUB_HINT)
    if folder.is_absolute() or path.startswith("."):
        raise ModelError(f"There is no folder {path!r}.", HUB_HINT)
    return _download(path, code)


def local_folder(path: str) -> Path | None:
    """Return the folder of a model on this machine, which may be in the hub's cache.

    Return None for a hub model that is not downloaded yet.

    Raises:
        ModelError: the folder does not contain a model.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(path).is_dir() or Path(path).is_absolute() or path.startswith("."):
        return model_folder(path)
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError as error:
        raise _unknown_model(path) from error
    return Path(cached).parent if isinstance(cached, str) else None


def check_on_hub(name: str) -> None:
    """Check that a hub model exists, in the cache or on the hub.

    Raises:
        ModelError: the hub has no such model, or cannot be reached.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise _unknown_model(name) from error
    answer = "known" if cached else hub.ask_hub("model", name)
    if answer == "unknown":
        raise _unknown_model(name)
    if answer == "away":
        raise _hub_away(name)


def _unknown_model(name: str) -> ModelError:
    return ModelError(f"There is no model {name!r}, here or on the hub.", HUB_HINT)


def _hub_away(name: str) -> ModelError:
    return ModelError(f"Cannot reach the hub for {name!r}.", HUB_HINT)


def _download(name: str, code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*_FETCH_PATTERNS, *(["*.py"] if code else [])]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _unknown_model(name) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise _hub_away(name) from error


def find_model_files(name: str, dataset: str) -> ModelFiles | None:
    """Return the config and the shapes of a model, from its files on this machine or on the hub. No weights are downloaded.

    Return None if the hub does not know the model, or does not respond.

    Args:
        name: a model's name or folder.
        dataset: the dataset that decides which model `tiny` means.

    Raises:
        ModelError: the model does not exist here, or its files are malformed.
    """
    base = resolve_model(name, dataset)
    folder = local_folder(base)
    if folder is not None and any(folder.glob("*.safetensors")):
        return read_model_files(folder)
    if Path(base).exists() or hub.ask_hub("model", base) != "known":
        return None
    return hub.answer_in_time(lambda: _files_on_hub(base))


def _files_on_hub(name: str) -> ModelFiles:
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = HfApi()
    with TemporaryDirectory() as folder:  # not the cache: a model there counts as fetched
        config = read_config(Path(api.hf_hub_download(name, "config.json", local_dir=folder)).parent)
    headers = api.get_safetensors_metadata(name, timeout=hub.ANSWER_SECONDS).files_metadata.values()
    entries = {weight: asdict(entry) for header in headers for weight, entry in header.tensors.items()}
    for entry in entries.values():
        entry["data_offsets"] = list(entry["data_offsets"])
    return ModelFiles(config, {weight: checked_shape(entry, MAX_FILE_BYTES) for weight, entry in entries.items()})


def lora_rank(config: ModelConfig, folder: Path) -> int:
    """Return the LoRA rank in effect; 0 trains all weights.

    Raises:
        ModelError: a file of weights cannot be read.
    """
    chosen = config.lora_r is not None or config.load_in_4bit or config.load_in_8bit
    return lora_rank_of(config, {} if chosen else read_shapes(folder))


def lora_rank_of(config: ModelConfig, shapes: Shapes) -> int:
    """Return the LoRA rank in effect for a model with these weights; 0 trains all weights."""
    if config.lora_r is not None:
        return config.lora_r
    if config.load_in_4bit or config.load_in_8bit:
        return 8
    return 0 if sum(map(prod, shapes.values())) < SMALL else 8


def base_hash(folder: Path) -> str:
    """Return the sha256 over a model's weights, config and tokenizer files (about a second per gigabyte).

    Raises:
        ModelError: the folder has no `*.safetensors`, or a file cannot be read.
    """
    check_files(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"The folder {str(folder)!r} holds no *.safetensors.", "Convert the model: save_pretrained(...)")
    texts = [folder / name for name in _TEXT_FILES if (folder / name).is_file()]
    try:
        lines = [f"{file.name} {sha256_file(file)}" for file in [*texts, *weights]]
    except OSError as error:
        raise ModelError(f"Cannot read the model in {str(folder)!r}: {error.strerror}.", "Check its permissions.") from error
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def check_base(base: str, expected_hash: str) -> None:
    """Check that a local base has not changed since weights were trained on it.

    Args:
        expected_hash: the recorded hash of the base; empty if it is unknown.

    Raises:
        ModelError: the base has changed.
    """
    if expected_hash and Path(base).is_dir() and base_hash(Path(base)) != expected_hash:
        problem = f"The model in {base!r} has changed since these weights were trained on it (sha256 {expected_hash[:12]}...)"
        raise ModelError(f"{problem}.", "Put the old base back, or use another policy.")
