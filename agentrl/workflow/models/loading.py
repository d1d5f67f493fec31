"""The loading of a base from its folder: tokenizer, context window, quantisation, precision, and LoRA's layers."""

import logging
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.templates import read_object
from agentrl.workflow.config import ALL_LINEAR, MAX_INT, PROJECTIONS, ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.cache_layout import read_layout
from agentrl.workflow.models.devices import auto_dtype
from agentrl.workflow.models.fast_forward import is_supported
from agentrl.workflow.models.gguf_files import read_gguf_record
from agentrl.workflow.models.headers import read_shapes
from agentrl.workflow.models.lookup import TRUST, check_folder, check_size, lora_rank, quantised_bits
from agentrl.workflow.models.lora_targets import LoraLayers, choose_linear, count_by_name
from agentrl.workflow.models.memory import return_freed_memory
from agentrl.workflow.models.parameters import Parameters, count_trained
from agentrl.workflow.runtime.gc_pause import pause_gc
from agentrl.workflow.tool_formats import AUTO

if TYPE_CHECKING:
    from peft import LoraConfig

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
# bitsandbytes warns once per layer and step: about int8's inputs, and about a name that peft still uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# transformers warns about the precision in which a quantised base is dequantised: that in which it computes.
logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)
# It warns about a text longer than the model's window; here such a text ends the turn, and nothing is indexed beyond.
logging.getLogger("transformers.tokenization_utils_base").addFilter(lambda record: "indexing errors" not in record.getMessage())
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)

_COPY = "Copy the model again, all files of one version."
_OTHER = "Copy the model again, or pass another."
_FILE_FAULTS = (
    OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, AssertionError, RecursionError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip
"""The exceptions that transformers raises for malformed files."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_loading_lock = threading.Lock()
"""The lock that is held while transformers builds a model.

If two models are built at once, one of them loses the link between its tied weights.
"""


def load(config: ModelConfig, folder: Path, device: torch.device, kind: Literal["lora", "full"]) -> Any:
    """Load the base and its tokenizer.

    Args:
        kind: lora or full; it decides what the precision `auto` means.

    Raises:
        ModelError: the files are not a valid model.
    """
    dtype = _dtype(config, device, kind)
    extra = _placement(config, dtype, device)
    _check_memory(config, folder, device, dtype)
    # Freed memory is returned at once, because each weight is read whole before it is quantised.
    with _translate_faults(folder, "model"):
        _refuse_other_kinds(AutoConfig.from_pretrained(folder, **_options(config.trust_remote_code)))
    try:
        model, report = _load_weights(config, folder, device, {**_options(config.trust_remote_code), **extra, "dtype": dtype})
    except RuntimeError:
        build_without_weights(config, folder)  # raises ModelError if the config is the cause
        raise
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"The files in {str(folder)!r} lack {len(missing)} weights of the model, such as {missing[0]}.", _COPY)
    # torch gives the padding token's embedding no gradient; it must have one if that token also ends turns.
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010 - mypy takes it for a tensor
    return _disable_repacking(model) if config.load_in_4bit else model


def _load_weights(config: ModelConfig, folder: Path, device: torch.device, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the model, and what transformers reports about its weights."""
    with (
        _loading_lock,
        pause_gc(),
        _translate_faults(folder, "model"),
        _translate_attention(config),
        return_freed_memory(device, config.load_in_4bit or config.load_in_8bit),
    ):
        wanted = {**options, "output_loading_info": True}
        loaded: tuple[Any, Any] = AutoModelForCausalLM.from_pretrained(folder, **wanted)  # type: ignore[assignment]
        return loaded


def _check_memory(config: ModelConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError if the weights alone are larger than the device's whole memory."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    check_size(folder, quantised_bits(config) or 8 * dtype.itemsize, total, str(device))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that a run's plan shows. They come from the model's files; no weights are loaded.

    Args:
        sampler: how the built-in sampler will run the model.
        lora_layers: the number of layers with an adapter, by name; empty if all weights train.
        trained: the number of parameters, and the number of those that train.
        remarks: sentences about dequantised weights, and about weights that do not train.
    """

    sampler: str
    lora_layers: Mapping[str, int]
    trained: Parameters
    remarks: tuple[str, ...]


def check(config: ModelConfig, folder: Path) -> ModelFacts:
    """Check that `load` would succeed. Only the shapes of the weights are read, from the headers of the files.

    The attention implementation is not checked, because it depends on the machine that loads the model.

    Raises:
        ModelError: the files are not a valid model or tokenizer, weights are missing or do not have the shapes of the config,
            the chat template cannot be rendered, or LoRA has no layer to train.
    """
    check_folder(config, folder)
    longest, vocabulary = context_and_vocabulary(folder, config.trust_remote_code)
    _check_vocabulary(load_chat(config, folder), vocabulary, folder)
    shapes = read_shapes(folder)
    model = build_without_weights(config, folder)
    model_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    other = sorted(name for name, shape in shapes.items() if model_shapes.get(name, shape) != shape)
    if other:
        raise _other_shapes(folder, f"{other[0]} is {shapes[other[0]]}, not {model_shapes[other[0]]}")
    if {_place(name) for name in shapes}.isdisjoint(_place(name) for name in model_shapes):
        raise ModelError(f"None of the weights in {str(folder)!r} belongs to the model that its config.json names.", _COPY)
    rank = lora_rank(config, folder)
    layers = find_lora_layers(config, model) if rank else None
    counts = count_by_name(layers.names) if layers else {}
    trained = count_trained(model.num_parameters(), rank, layers)
    remarks = (*_remark_on_gguf(folder), *(_remark_on_experts(model) if layers else ()))
    return ModelFacts(_describe_sampler(config, model, longest), counts, trained, remarks)


def _describe_sampler(config: ModelConfig, model: Any, longest: int) -> str:
    """Describe how the sampler will run the model. When the model is loaded, a test still decides."""
    layout = read_layout(model.config, longest)
    masked = model.config._attn_implementation == "sdpa" and config.attn_implementation in ("auto", "sdpa")
    if layout is None or not (layout.window is None or masked):
        return "general path: transformers' cache, rows of equal length at once; slower"
    if masked and layout.is_plain and is_supported(model):
        return "agentrl's own forward pass, all rows at once"
    return "transformers' forward pass, all rows at once"


def _remark_on_gguf(folder: Path) -> tuple[str, ...]:
    record = read_gguf_record(folder)
    return (f"The weights are those of {record['file']}, dequantised to {record['dtype']}.",) if record else ()


def _remark_on_experts(model: Any) -> tuple[str, ...]:
    fused = any(".experts." in name and parameter.ndim == 3 for name, parameter in model.named_parameters())
    return ("LoRA cannot train experts, or layers with their names.",) if fused else ()


def _place(name: str) -> str:
    """Return the part of a weight's name that follows `layers.`.

    A model with several parts may have its text layers under another prefix.
    """
    return name.rpartition("layers.")[2]


def _check_vocabulary(chat: Chat, vocabulary: int, folder: Path) -> None:
    """Raise ModelError if the tokenizer belongs to another model.

    Added tokens of the tokenizer may exceed the model's vocabulary.
    """
    if chat.tokenizer.vocab_size > vocabulary:
        problem = f"The tokenizer in {str(folder)!r} has {chat.tokenizer.vocab_size:,} tokens, the model only {vocabulary:,}"
        raise ModelError(f"{problem}: it belongs to another model.", _COPY)


def build_without_weights(config: ModelConfig, folder: Path) -> Any:
    """Build the model that the folder's config describes, on the device `meta`, which stores no numbers.

    Raises:
        ModelError: the config does not describe a causal language model.
    """
    with _loading_lock, pause_gc(), _translate_faults(folder, "model"), torch.device("meta"):
        described = AutoConfig.from_pretrained(folder, **_options(config.trust_remote_code))
        _refuse_other_kinds(described)
        try:
            return AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # without memory or kernels, only the config can cause it
            raise _invalid(folder, "model", error) from error


def _refuse_other_kinds(config: Any) -> None:
    """Raise ModelError if the config describes a model that is not a causal language model."""
    is_supported = type(config) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in getattr(
        config, "auto_map", {}
    )
    if not is_supported or config.is_encoder_decoder:
        problem = f"{config.model_type!r} is not a causal language model that transformers can run"
        raise ModelError(f"{problem}: it cannot be sampled or trained here.", "To evaluate it, use a server: --engine openai.")


def find_lora_layers(config: ModelConfig, model: Any) -> LoraLayers:
    """Return the layers that LoRA trains.

    Raises:
        ModelError: the model has no linear layer, or lacks layers that the config names. Configs of older runs list all default
            layers by name, so the model needs to have only one of these.
    """
    head = model.get_output_embeddings()
    linear = {
        name: _width(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    if config.lora_targets == (ALL_LINEAR,):
        inside = {f"{part}.{name}" if part else name for part, name in _decoder_modules(model)}
        chosen = choose_linear([name for name in linear if name in inside], {name for name, _ in model.named_parameters()})
        missing = [] if chosen else ["linear layers of the decoder"]
    else:
        ends = tuple(f".{target}" for target in config.lora_targets)
        chosen = [name for name in linear if name.endswith(ends) or name in config.lora_targets]
        missing = [target for target in config.lora_targets if not any(f".{name}".endswith(f".{target}") for name in linear)]
    if chosen and (not missing or config.lora_targets == PROJECTIONS):
        modules = dict(model.named_modules())
        transposed = any(isinstance(modules[name], Conv1D) for name in chosen)
        return LoraLayers.of({name: linear[name] for name in chosen}, modules, transposed)
    there = ", ".join(sorted(count_by_name(linear))[:20])
    problem = f"LoRA is to train {', '.join(missing)}, which are not linear layers of this model"
    raise ModelError(f"{problem}; it has {there}." if there else f"{problem}.", "Set model.lora_targets, or model.lora_r=0.")


def _width(layer: Any) -> int:
    """Return the sum of a linear layer's input and output width."""
    return int(layer.in_features + layer.out_features if isinstance(layer, nn.Linear) else sum(layer.weight.shape))


def _decoder_modules(model: Any) -> list[tuple[str, str]]:
    """Return, for each module of the language model's decoder, the decoder's name in the model and the module's name in the
    decoder.
    """
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # some models call their head so
        decoder = model
    place = next(name for name, module in model.named_modules() if module is decoder)
    return [(place, name) for name, _ in decoder.named_modules()]


def _other_shapes(folder: Path, which: str = "") -> ModelError:
    problem = f"The weights in {str(folder)!r} have other shapes than its config.json says"
    return ModelError(f"{problem}: {which}." if which else f"{problem}.", _COPY)


def lora_config(config: ModelConfig, rank: int, layers: LoraLayers) -> "LoraConfig":
    """Return PEFT's config of LoRA (Hu et al. 2021) on these layers.

    The default is all linear layers, as in QLoRA (Dettmers et al. 2023).
    """
    # Imported here: with bitsandbytes it takes as long as all other imports, and full weights need neither.
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # annotated int; only divided by r
        lora_dropout=config.lora_dropout,
        target_modules=list(layers.targets),
        fan_in_fan_out=layers.transposed,
        task_type="CAUSAL_LM",
    )


def context_and_vocabulary(folder: Path, code: bool = False) -> tuple[int, int]:
    """Return the most tokens of one row and the number of ids in the model's last layer.

    If the config has no limit, as for models without positions, the first number is `MAX_INT`.

    Raises:
        ModelError: the files are not a valid model.
    """
    with _translate_faults(folder, "model"):
        config = AutoConfig.from_pretrained(folder, **_options(code)).get_text_config()
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        return next((int(limit) for limit in limits if limit and limit > 0), MAX_INT), int(config.vocab_size)


def load_tokenizer(folder: Path, code: bool = False) -> Any:
    """Load the folder's tokenizer.

    Args:
        code: whether the folder's own code may run.

    Raises:
        ModelError: the files are not a valid tokenizer.
    """
    with _translate_faults(folder, "tokenizer"):
        return AutoTokenizer.from_pretrained(folder, **_options(code))


def load_chat(config: ModelConfig, folder: Path) -> Chat:
    """Load the folder's tokenizer, with the chat template and the tool format of the config.

    Raises:
        ModelError: the files are not a valid tokenizer, or its template cannot be rendered.
        ConfigError: the tool format does not exist.
    """
    tokenizer = load_tokenizer(folder, config.trust_remote_code)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    with _translate_faults(folder, "tokenizer"):
        return Chat(tokenizer, config.tool_format or AUTO, read_stop_ids(folder), config.strict_calls)


def read_stop_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end a turn.

    They come from `generation_config.json`, or from `config.json` if the first file lists none.
    """
    for name in ("generation_config.json", "config.json"):
        listed = read_object(folder / name).get("eos_token_id")
        ids = [token for token in (listed if isinstance(listed, list) else [listed]) if type(token) is int]
        if ids:
            return tuple(ids)
    return ()


@contextmanager
def _translate_faults(folder: Path, part: str) -> Iterator[None]:
    """Convert exceptions about the folder's files to ModelError.

    Exceptions that the machine causes, such as out of memory, are not changed.
    """
    try:
        yield
    except _FILE_FAULTS as error:
        if "trust_remote_code" in str(error):  # a hub model, whose code was not fetched
            raise ModelError(
                f"The {part} in {str(folder)!r} needs its own code (Python files that come with it).", TRUST
            ) from error
        raise _invalid(folder, part, error) from error
    except ImportError as error:
        problem = f"The {part} in {str(folder)!r} needs a package that is not here: {_sentence(error)}."
        raise ModelError(problem, "Install it, or pass another model.") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise _other_shapes(folder) from error


def _invalid(folder: Path, part: str, error: Exception) -> ModelError:
    return ModelError(f"The files in {str(folder)!r} are not a valid {part}: {_sentence(error)}.", _OTHER)


@contextmanager
def _translate_attention(config: ModelConfig) -> Iterator[None]:
    """Convert transformers' refusal of an attention implementation to ModelError.

    transformers refuses one that this machine or the model does not support.
    """
    try:
        yield
    except (ImportError, ValueError) as error:
        if config.attn_implementation == "auto" or "attention" not in str(error).lower():
            raise
        problem = f"model.attn_implementation={config.attn_implementation} cannot be used here: {_sentence(error)}."
        raise ModelError(problem, "Set model.attn_implementation=auto.") from error


def _options(code: bool) -> dict[str, Any]:
    """Return the options for every call of `from_pretrained`."""
    return {"local_files_only": True, "trust_remote_code": code}


def _sentence(error: Exception) -> str:
    """Return the message of a transformers exception without the advice to install another version of transformers."""
    text = " ".join(str(error).split()).partition(". ")[0].rstrip(".") or type(error).__name__
    return f"it names an unknown {text}" if isinstance(error, KeyError) else text[:300]


def _dtype(config: ModelConfig, device: torch.device, kind: Literal["lora", "full"]) -> torch.dtype:
    if config.numerics == "exact":
        return torch.float64
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return auto_dtype(device, kind)


def _placement(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    place: dict[str, Any] = {"device_map": {"": device}}
    if config.attn_implementation != "auto":
        place["attn_implementation"] = config.attn_implementation
    if config.load_in_8bit:
        place["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    if config.load_in_4bit:
        place["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    return place


def _disable_repacking(model: Any) -> Any:
    """Prevent bitsandbytes from repacking the weights for the CPU.

    It would repack them permanently at the first sampled token, and training would then fail.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model
