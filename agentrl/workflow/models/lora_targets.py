"""The layers that LoRA trains, by name: those of the config, or by default every linear layer of the decoder.

This module needs no torch: names and shapes come from a loaded model or from the headers of its files.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.workflow.config import ALL_LINEAR
from agentrl.workflow.models.headers import Shapes

LEFT_OUT = frozenset({"gate", "router", "shared_expert_gate", "indexer", "encoder_attn"})
"""Parts of names whose layers get no adapter.

An adapter would make the choice of experts unstable. Layers that choose keys get no gradient. A decoder without an encoder does
not use the layers for attention to an encoder.
"""


@dataclass(frozen=True, slots=True)
class LoraLayers:
    """The layers of a model that LoRA trains.

    Args:
        names: the full names of the layers.
        targets: names that select exactly these layers. If the last parts of the full names suffice, they are used.
        width: the number of weights of an adapter with rank 1.
        transposed: whether the layers store their weights as (inputs, outputs), as in GPT-2.
    """

    names: tuple[str, ...]
    targets: tuple[str, ...]
    width: int
    transposed: bool

    @classmethod
    def of(cls, chosen: Mapping[str, int], modules: Iterable[str], transposed: bool) -> "LoraLayers":
        """Make the `LoraLayers` of the selected layers.

        Args:
            chosen: the sum of input and output width of each selected layer, by name.
            modules: all modules of the model.
        """
        last = tuple(count_by_name(chosen))
        other_names = {_last(name) for name in set(modules) - set(chosen)}
        return cls(tuple(chosen), tuple(chosen) if other_names & set(last) else last, sum(chosen.values()), transposed)


EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""The names that PEFT treats as experts in a model that has experts, although other layers of it have these names too."""

_NO_DECODER = ("embed", "vision", "visual", "audio", "multi_modal", "conv1d")
"""Parts of names of weights that are not linear layers of the decoder. They are used if only a file's names are known."""


def choose_linear(names: Iterable[str], siblings: Collection[str]) -> list[str]:
    """Return the layers that LoRA trains by default, among the linear layers of a decoder.

    These layers get no adapter:

    - layers in `LEFT_OUT`
    - the output and step-size layers of Mamba: its kernels read the weights directly, without an adapter
    - in a model with experts, all layers with names in `EXPERT_NAMES`

    Args:
        names: the names of the linear layers, without the head.
        siblings: the names of all parameters of the model; Mamba's layers have one called `D`.
    """
    hidden = EXPERT_NAMES if any(".experts." in name for name in siblings) else frozenset()
    candidates = [name for name in names if not LEFT_OUT & set(name.split(".")) and _last(name) not in hidden]
    return [name for name in candidates if not _is_read_by_kernel(name, siblings)]


def adapted_shapes(shapes: Shapes, targets: Sequence[str], vocabulary: int) -> list[tuple[int, ...]]:
    """Return the shapes of the weights that get an adapter, as far as names and shapes in a model's files show them.

    Args:
        vocabulary: the number of token ids. It identifies the embedding and the head, which have that many rows.
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
    """Return the number of layers for each last part of a name, in the order in which these parts first occur."""
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
