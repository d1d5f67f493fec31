"""The layout of the sampler's slots: for each layer of a model, the data that a slot holds (keys and values, or states), and
the window.

The layout follows from the model's config. Slots do not support some kinds of layers (compressed or indexed keys, attention in
chunks). A model with such a layer is sampled with transformers' own cache (`inference.cache_rows`).
"""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

Content = Literal["keys", "states", "keys and states", "nothing"]

EmptyLayer: Any = getattr(cache_utils, "DummyLayer", None)
"""The cache layer of a layer that keeps no data; None in older versions of transformers 5."""

_CONTENTS: dict[type, Content] = {
    DynamicLayer: "keys",
    DynamicSlidingWindowLayer: "keys",
    LinearAttentionLayer: "states",
    LinearAttentionAndFullAttentionLayer: "keys and states",
    EmptyLayer: "nothing",
}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of a slot.

    Args:
        layers: for each layer, the kind of data that it stores for a row.
        states: for each layer, the number of its convolution and recurrent states; 1 for layers without states.
        window: the most tokens that the layers with a sliding window attend to. None if no layer has a window, or if no row is
            longer than the window.
        kinds: the names of the kinds of layers, if only some layers have the window, because each kind then has a different
            mask. Otherwise empty.
    """

    layers: tuple[Content, ...]
    states: tuple[int, ...]
    window: int | None
    kinds: frozenset[str]

    @property
    def rewinds(self) -> bool:
        """True if the first tokens of a row can be copied from its slot without the later ones.

        A layer with states does not allow this, because it stores only the states after the row's last token.
        """
        return all("states" not in content for content in self.layers)

    @property
    def is_plain(self) -> bool:
        """True if all layers attend to all earlier tokens and keep only keys and values."""
        return self.window is None and all(content == "keys" for content in self.layers)


def read_layout(config: PreTrainedConfig, longest: int) -> CacheLayout | None:
    """Return the layout of a model's slots, or None if a slot cannot hold the data of every layer.

    Args:
        longest: the most tokens in a row.
    """
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except Exception:  # noqa: BLE001 - a config that transformers makes no cache of, in whatever way it fails
        return None
    kinds = frozenset(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    windows = {layer.sliding_window for layer in layers if _slides(layer)}
    narrow = {window for window in windows if window < longest}
    unknown = [layer for layer in layers if type(layer) not in _CONTENTS]
    if not layers or unknown or len(narrow) > 1 or (narrow and narrow != windows) or "chunked_attention" in kinds:
        return None
    others = any(not _slides(layer) and _CONTENTS[type(layer)] != "nothing" for layer in layers)
    return CacheLayout(
        tuple(_CONTENTS[type(layer)] for layer in layers),
        tuple(getattr(layer, "number_of_states", 1) for layer in layers),
        next(iter(narrow), None),
        kinds if narrow and others else frozenset(),
    )


def _slides(layer: Any) -> bool:
    return isinstance(layer, DynamicSlidingWindowLayer)
