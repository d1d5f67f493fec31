"""The layers that LoRA trains, by name: those of the config, or by default every linear layer of the decoder.

This module needs no torch: names and shapes come from a loaded model or from the headers of its files.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.workflow.config import ALL_LINEAR
from agentrl.workflow.models.headers import Shapes

LEFT_OUT = frozenset({"gate", "router", "shared_expert_gate", "indexer", "encoder_attn"})
"""Parts of models that get no adapter.

An adapter makes the choice of experts unstable. Layers that choose keys get no gradient. A decoder alone has no attention to an
encoder.
"""


@dataclass(frozen=True, slots=True)
class LoraLayers:
    """The layers of a model that LoRA trains.

    Args:
        names: the full names of the layers.
        targets: names that select these layers and no others: only the last parts of the names, if they suffice.
        width: the number of weights of an adapter with rank 1.
        transposed: whether the layers store their weights as (inputs, outputs), as in GPT-2.
    """

    names: tuple[str, ...]
    targets: tuple[str, ...]
    width: int
    transposed: bool

    @classmethod
    def of(cls, chosen: Mapping[str, int], modules: Iterable[str], transposed: bool) -> "LoraLayers":
        """Return the selected layers among all modules of a model.

        Args:
            chosen: the number of inputs plus outputs of each selected layer, by name.
        """
        last = tuple(count_by_name(chosen))
        other_names = {_last(name) for name in set(modules) - set(chosen)}
        return cls(tuple(chosen), tuple(chosen) if other_names & set(last) else last, sum(chosen.values()), transposed)


EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""The names that PEFT treats as experts in a model that has experts, though other layers have them too."""

_NO_DECODER = ("embed", "vision", "visual", "audio", "multi_modal", "conv1d")
"""Parts of names of weights that are not linear layers of the decoder, for use when only a file's names are known."""


def choose_linear(names: Iterable[str], siblings: Collection[str]) -> list[str]:
    """Return the layers that LoRA trains by default, among the linear layers of a decoder.

    Layers in `LEFT_OUT` get no adapter. Nor do the output and step-size layers of Mamba: its kernels read the weights directly,
    without an adapter. In a model with experts, other layers with names of experts get none either.

    Args:
        names: the names of the linear layers, without the head.
        siblings: the names of all parameters of the model; Mamba's layers have one called `D`.
    """
    hidden = EXPERT_NAMES if any(".experts." in name for name in siblings) else frozenset()
    candidates = [name for name in names if not LEFT_OUT & set(name.split(".")) and _last(name) not in hidden]
    return [name for name in candidates if not _is_read_by_kernel(name, siblings)]


def adapted_shapes(shapes: Shapes, targets: Sequence[str], vocabulary: int) -> list[tuple[int, ...]]:
    """Return the shapes of the weights that get an adapter, as far as the names in a model's files tell.

    Args:
        vocabulary: the number of token ids; embedding and head have that many rows.
    """
    matrices = {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")
    }
    if tuple(targets) != (ALL_LINEAR,):
        ends = tuple(f".{target}" for target in targets)
        return [shape for name, shape in matrices.items() if name.endswith(ends)]
    linear = [name for name, shape in matrices.items() if vocabulary not in shape and _may_be_linear(name)]
    return [matrices[name] for name in choose_linear(linear, shapes)]


def count_by_name(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers by the last part of their name, in the order of first occurrence."""
    counts: dict[str, int] = {}
    for name in names:
        counts[_last(name)] = counts.get(_last(name), 0) + 1
    return counts


def _may_be_linear(name: str) -> bool:
    parts = name.split(".")
    return (
        "experts" not in parts and parts[-1] not in ("wte", "wpe", "lm_head") and not any(word in name for word in _NO_DECODER)
    )


def _is_read_by_kernel(name: str, siblings: Collection[str]) -> bool:
    return _last(name) in ("out_proj", "dt_proj") and f"{name.rpartition('.')[0]}.D" in siblings


def _last(name: str) -> str:
    return name.rpartition(".")[2]
