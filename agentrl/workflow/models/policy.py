"""The policy: a base model, the part of it that trains, and the frozen published weights that sampling reads.

There are two kinds:

- `lora` has one base (4-bit, 8-bit or unquantised) with two adapters. The optimizer writes the adapter `policy`; the adapter
  `sampler` holds the published weights. The reference is the base with its adapter switched off.
- `full` trains all weights of a small model. The sampler is a second, frozen copy.

So one process samples and trains with one base, and sampling never reads a tensor that the optimizer writes.

The context managers `sampling`, `training` and `reference` yield modules, and `decoding` yields the sampling weights as one
function. Each holds `lock` while it is open, because they share one base. Keep them open only for a short time.
"""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.workflow import checkpoints
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.checkpoints import ADAPTER, MODEL, sha256_file, weights_of
from agentrl.workflow.config import PROJECTIONS, ModelConfig
from agentrl.workflow.errors import CheckpointError, ModelError
from agentrl.workflow.models import loading
from agentrl.workflow.models.adapter_precision import cast_adapters_down
from agentrl.workflow.models.cache_layout import read_layout
from agentrl.workflow.models.devices import mixed_dtype, pick_device
from agentrl.workflow.models.fast_forward import FastForward, Pass, is_supported, transformers_pass
from agentrl.workflow.models.logprobs import causal_model
from agentrl.workflow.models.lookup import base_hash, check_folder, code_hash, lora_rank, model_folder
from agentrl.workflow.models.lora_targets import LoraLayers, count_by_name
from agentrl.workflow.models.memory_estimate import COPY_LIMIT
from agentrl.workflow.models.parameters import count_trained
from agentrl.workflow.trajectory import PolicyRef

if TYPE_CHECKING:
    from peft import LoraConfig

Slot = Literal["policy", "sampler"]


class Policy:
    """A loaded model. Make one with `Policy.load`.

    Attributes:
        base_hash: the hash that names the base in every `PolicyRef`.
        code_hash: the hash of the base's own code that ran; empty if none did.
        kind: `lora` or `full`.
        max_context: the most tokens of one row.
        vocabulary: the number of ids that the model can sample.
        lock: held while the modules are in use.
        mixed_dtype: the precision of products with trained float32 weights; None: float32.
    """

    def __init__(self, config: ModelConfig, folder: Path, device: str, weights: bool = True) -> None:
        self.config = config
        self.folder = folder
        self.device = torch.device(device)
        self.lock = threading.RLock()
        check_folder(config, folder)
        self.chat: Chat = loading.load_chat(config, folder)
        self.tokenizer = self.chat.tokenizer
        self.rank = lora_rank(config, folder)
        self.kind: Literal["lora", "full"] = "lora" if self.rank else "full"
        if self.kind == "lora" and config.sampler_dtype != "auto":
            raise ModelError(
                "model.sampler_dtype has no effect with LoRA: the sampler shares the trainer's base.",
                "Set model.dtype instead.",
            )
        self.max_context, self.vocabulary = loading.context_and_vocabulary(folder, config.trust_remote_code)
        by_device = config.dtype == "auto" and config.numerics != "exact"
        self.mixed_dtype = mixed_dtype(self.device, self.kind) if by_device else None
        self._lora_layers: LoraLayers | None = None
        self._reference: nn.Module | None = None
        self._published: str | None = ""
        self._in_memory: dict[Slot, Any] = {}
        self._pass: Pass | None = None
        self._initial: dict[str, Tensor] = {}
        loaded = self._base() if weights else None
        self.code_hash = code_hash(folder) if config.trust_remote_code else ""
        self.base_hash = base_hash(folder)  # hashed after reading: files replaced meanwhile never pass for the old ones
        if loaded is not None:
            self._install(loaded)

    @classmethod
    def load(cls, config: ModelConfig, path: str, device: str = "auto", threads: int = 0, weights: bool = True) -> "Policy":
        """Load a base and make its trainable part.

        Args:
            config: quantisation, LoRA and numerics. `numerics: exact` computes on the CPU in float64, on one thread.
            path: a folder in the hub's format, or a hub name (see `models.lookup.resolve_model`).
            device: the device; `auto` uses a GPU if there is one.
            threads: CPU threads for the complete process; 0: torch's choice.
            weights: whether to read the weights now. If False, they are read at first use. A process that samples with a server
                may never need them.

        Raises:
            ModelError: the model is not found, the hub cannot be reached, or the files are not a valid model.
        """
        if config.numerics == "exact":
            if device not in ("auto", "cpu"):
                raise ModelError(
                    f"A run with `numerics: exact` computes on the CPU, not on {device!r}.", "Set AGENTRL_DEVICE=cpu."
                )
            device, threads = "cpu", 1
            torch.use_deterministic_algorithms(True)
        if threads:
            torch.set_num_threads(threads)
        return cls(config, model_folder(path, config.trust_remote_code), pick_device(device), weights)

    @contextmanager
    def sampling(self) -> Iterator[nn.Module]:
        """Yield the model with the frozen published weights, in eval mode. The caller must turn gradients off."""
        with self.lock:
            model = self._active("sampler")
            yield model.eval() if model.training else model

    @contextmanager
    def decoding(self) -> Iterator[Pass]:
        """Yield the engine's forward pass with the weights of `sampling`. The caller must turn gradients off."""
        with self.sampling() as model:
            if self._pass is None:
                self._pass = self._forward_pass(model)
            yield self._pass

    def has_fast_forward(self) -> bool:
        """Return True if `decoding` uses agentrl's own forward pass."""
        with self.sampling() as model:
            layout = read_layout(causal_model(model).config, self.max_context)
            return layout is not None and layout.is_plain and is_supported(model, self._sampling_adapter)

    @contextmanager
    def training(self) -> Iterator[nn.Module]:
        """Yield the model with the trained weights, in train mode.

        Matrix products inside the context are computed in `mixed_dtype`.
        """
        with self.lock, self._mixed_precision():
            yield self._active("policy").train()

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """Yield the base as it was before training, in eval mode.

        It is the base without its adapter, or a frozen copy that the first use makes.

        Raises:
            CheckpointError: the base's files have changed since they were loaded.
        """
        with self.lock:
            if self.kind == "lora":
                with self._active("policy").eval().disable_adapter():
                    yield self._models["policy"]
                return
            if self._reference is None:
                self._reference = _freeze(self._reload_base())
            with self._mixed_precision():
                yield self._reference

    @contextmanager
    def _mixed_precision(self) -> Iterator[None]:
        """Compute matrix products in `mixed_dtype`, and those that stay in float32 in TF32."""
        if self.mixed_dtype is None:
            yield
            return
        before = torch.get_float32_matmul_precision()  # of the process: other models compute in it too
        torch.set_float32_matmul_precision("high")
        try:
            # Without the cache of casts: one that a forward pass without gradient made would cut later gradients.
            with torch.autocast(self.device.type, self.mixed_dtype, cache_enabled=False):
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    def publish(self, ref: PolicyRef) -> bool:
        """Make `sampling` use the weights of `ref` (an empty path: the base itself). Return True if the weights changed.

        Raises:
            CheckpointError: the weights belong to another base, are missing, or have changed since their sha256 was recorded;
                or the base's files have changed since they were loaded.
            ServiceError: the weights are at a URL that does not respond.
        """
        self.check(ref)
        if ref.sha256 == self._published:
            return False
        weights = _read_published(ref) if ref.path else self._base_weights()
        with self.lock:
            self._published = None  # until all weights are set
            self._fill("sampler", weights)
            self._published = ref.sha256
        return True

    def check(self, ref: PolicyRef) -> None:
        """Check that `ref` belongs to this base.

        Raises:
            CheckpointError: `ref` belongs to another base.
        """
        if ref.base_hash not in ("", self.base_hash):  # empty: the submitting machine did not have the base
            raise CheckpointError(f"Policy version {ref.version} was trained on another base ({ref.base_hash[:12]}).")

    @property
    def precision(self) -> Literal["exact", "float32", "coarse"]:
        """The precision of sampler and trainer.

        `coarse` means that at least one of them uses 16 bits, or a base quantised to 4 or 8 bits.
        """
        if self.config.numerics == "exact":
            return "exact"
        with self.lock:
            kinds = {parameter.dtype for model in self._models.values() for parameter in model.parameters()}
        return "float32" if kinds == {torch.float32} else "coarse"

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer trains, by their names in the weights file."""
        return self._slot("policy")

    @property
    def lora_layers(self) -> LoraLayers:
        """The layers that have an adapter; only for the kind `lora`. Reading this property loads no weights."""
        if self._lora_layers is None:
            built = loading.build_without_weights(self.config, self.folder)
            self._lora_layers = loading.find_lora_layers(self.config, built)
        return self._lora_layers

    @cached_property
    def trained_part(self) -> dict[str, Any]:
        """The facts about the adapters that a run records; empty for the kind `full`.

        They are the number of layers with an adapter, by name, and the numbers of parameters.
        """
        if self.kind == "full":
            return {}
        base = loading.build_without_weights(self.config, self.folder).num_parameters()
        counts = count_trained(base, self.rank, self.lora_layers)
        layers = count_by_name(self.lora_layers.names)
        return {"lora": {"layers": layers, "trained": counts.trainable, "parameters": counts.all}}

    def lora_config(self) -> "LoraConfig":
        """Return PEFT's config of the adapters."""
        return loading.lora_config(self.config, self.rank, self.lora_layers)

    @property
    def weights_name(self) -> str:
        """The name of the file in a checkpoint that contains the trained part."""
        return ADAPTER if self.kind == "lora" else MODEL

    def save_weights(self, file: Path) -> None:
        """Write the trained part as one safetensors file, in the dtype in which it is trained."""
        with self.lock:
            tensors = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in self.trainable().items()}
        save_file(tensors, file, metadata={"format": "pt"})

    def load_weights(self, file: Path | None) -> None:
        """Set the trained part to the values in a file; None: to those of the base.

        Raises:
            CheckpointError: the file is missing, broken, or of another model; or the base's files have changed since they were
                loaded.
        """
        weights = self._base_weights() if file is None else _read(file)
        with self.lock:
            self._fill("policy", weights)

    @property
    def _models(self) -> dict[Slot, Any]:
        with self.lock:
            if not self._in_memory:
                self._install(self._reload_base())
            return self._in_memory

    def _install(self, loaded: Any) -> None:
        self._in_memory = self._lora_slots(loaded) if self.rank else self._full_slots(loaded)
        if self.rank:
            self._initial = {name: tensor.detach().clone() for name, tensor in self._slot("policy").items()}

    def _base(self) -> Any:
        return loading.load(self.config, self.folder, self.device, self.kind)

    def _lora_slots(self, loaded: Any) -> dict[Slot, Any]:
        self._lora_layers = loading.find_lora_layers(self.config, loaded)
        lora = self.lora_config()
        from peft import get_peft_model

        # Every process that loads this base must start from the same adapter, whatever the state of the generator.
        with torch.random.fork_rng():
            torch.manual_seed(int(self.base_hash[:8], 16))
            model = get_peft_model(loaded, lora, adapter_name="policy")
            model.add_adapter("sampler", lora)
        cast_adapters_down(model)
        self._check_places(model)
        return {"policy": model, "sampler": model}

    def _check_places(self, model: Any) -> None:
        """Check that PEFT added adapters to exactly the planned layers.

        An older run that uses the default layers is not checked.
        """
        names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
        got = {name.partition(".lora_A.")[0].removeprefix("base_model.model.") for name in names}
        if got != set(self.lora_layers.names) and self.config.lora_targets != PROJECTIONS:
            other = sorted(got ^ set(self.lora_layers.names))[0]
            raise ModelError(
                f"PEFT adds unexpected adapters to this model: {other}.", "Set model.lora_targets to other layers."
            )

    def _full_slots(self, loaded: Any) -> dict[Slot, Any]:
        sampler = _freeze(copy.deepcopy(loaded))
        dtype = self.mixed_dtype if self.config.sampler_dtype == "auto" else loading.DTYPES[self.config.sampler_dtype]
        if dtype is not None:
            for parameter in sampler.parameters():  # without the buffers: positions stay in float32
                parameter.data = parameter.data.to(dtype)
        return {"policy": loaded, "sampler": sampler}

    @torch.no_grad()
    def _forward_pass(self, model: Any) -> Pass:
        """Return the engine's forward pass with the published weights. A base that the trainer shares gets no packed copy."""
        if not self.has_fast_forward():
            return transformers_pass(model)
        return FastForward(model, self.kind == "full" and model.num_parameters() < COPY_LIMIT, self._sampling_adapter)

    @property
    def _sampling_adapter(self) -> str:
        return "sampler" if self.kind == "lora" else ""

    def _active(self, slot: Slot) -> Any:
        model = self._models[slot]
        if self.kind == "lora" and model.active_adapter != slot:
            model.set_adapter(slot, inference_mode=slot == "sampler")
        return model

    def _slot(self, slot: Slot) -> dict[str, nn.Parameter]:
        parameters = self._models[slot].named_parameters()
        if self.kind == "full":
            return dict(parameters)
        return {name.replace(f".{slot}.", "."): p for name, p in parameters if f".{slot}." in name}

    def _base_weights(self) -> Mapping[str, Tensor]:
        if self.kind == "full":
            return dict(self._reload_base().named_parameters())
        assert self._models  # loads them, and with them the initial adapter
        return self._initial

    def _reload_base(self) -> Any:
        """Read the base from its folder again.

        The hash is checked after the reading, so a change during the reading is detected too.
        """
        loaded = self._base()
        current_hash = base_hash(self.folder)
        if current_hash != self.base_hash:
            raise CheckpointError(
                f"The base in {str(self.folder)!r} has changed: its hash was {self.base_hash[:12]}, "
                f"now it is {current_hash[:12]}.",
                "Submit a new run, or put the old files back.",
            )
        return loaded

    @torch.no_grad()
    def _fill(self, slot: Slot, weights: Mapping[str, Tensor]) -> None:
        parameters = self._slot(slot)
        if {n: p.shape for n, p in parameters.items()} != {n: t.shape for n, t in weights.items()}:
            counts = f"they have {len(weights)} tensors, the model has {len(parameters)}, or their shapes differ"
            raise CheckpointError(f"The weights do not fit this model: {counts}.")
        old = self._pass
        if slot == "sampler":
            self._pass = None  # it was made of the old weights; a process that only trains never makes one
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        if slot == "sampler" and isinstance(old, FastForward) and old.refresh():
            self._pass = old


def _freeze(model: Any) -> Any:
    return model.requires_grad_(False).eval()


def _read_published(ref: PolicyRef) -> dict[str, Tensor]:
    return checkpoints.read(ref.path, ref.sha256, "weights", lambda folder: _read(checked_weights(folder, ref.sha256)))


def checked_weights(folder: Path, sha256: str) -> Path:
    """Return the path of the weights file in a checkpoint's folder, after checking its sha256.

    Raises:
        CheckpointError: the file is missing, or differs from the recorded sha256.
    """
    file = weights_of(folder)
    if not file.is_file():
        raise CheckpointError(
            f"The weights of the checkpoint {str(folder)!r} are missing.",
            "Put the files back. An unfinished run rebuilds its newest checkpoint by itself.",
        )
    digest = sha256_file(file)
    if digest != sha256:
        raise CheckpointError(f"{str(file)!r} has sha256 {digest[:12]}, the record says {sha256[:12]}: the file was altered.")
    return file


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Cannot read the weights {str(file)!r}: {error}.") from error


def open_run_base(
    config: ModelConfig, base: str, base_hash: str, manifest: Mapping[str, Any], device: str, threads: int
) -> Policy:
    """Load the base of a run.

    Args:
        base_hash: the run's hash of the base; empty if it was not recorded.
        manifest: the run's manifest, with its hashes of tokenizer and chat template, if they were recorded.

    Raises:
        ModelError: the base cannot be loaded, or is not the run's.
    """
    policy = Policy.load(config, base, device, threads)
    actual_hashes = {"base": policy.base_hash, "tokenizer": policy.chat.tokenizer_hash, "template": policy.chat.template_hash}
    actual_hashes |= {"code": policy.code_hash} if policy.code_hash else {}
    expected_hashes = {"base": base_hash or policy.base_hash, **manifest}
    for name, value in actual_hashes.items():
        if expected_hashes.get(name, value) != value:
            raise ModelError(
                f"The run was submitted with {name} {expected_hashes[name][:12]}, but {base!r} has {value[:12]} here.",
                "Copy the same model here.",
            )
    return policy


def open_with_weights(ref: PolicyRef, config: ModelConfig, manifest: Mapping[str, Any], device: str, threads: int) -> Policy:
    """Load the base of a run, and the weights of the policy `ref` as its trained part. Raises as `open_run_base` does.

    Raises:
        CheckpointError: the weights have changed, or belong to another base.
    """
    policy = open_run_base(config, ref.base, ref.base_hash, manifest, device, threads)
    if ref.path:
        checkpoints.read(ref.path, ref.sha256, "weights", lambda at: policy.load_weights(checked_weights(at, ref.sha256)))
    return policy
