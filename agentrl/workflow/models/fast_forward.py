"""The sampler's forward pass: it computes the same as transformers' Llama, Mistral, Qwen2 and Qwen3, with fewer operations.

A decoding step computes little per operation, so its time depends on the number of operations. This pass has a fourth of the
operations of transformers' modules:

- Products with the same input are one product (packed, if `packed_weights` can pack it).
- A LoRA adapter adds two small products.
- Query heads that share keys form one block.
- Values that all layers use are computed once.

The pass reads the weights of transformers' modules, and makes copies of some of them. Other architectures, and models with
another kind of attention, run through their own modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from agentrl.workflow.models.logprobs import cache_parameter, kept_logits
from agentrl.workflow.models.packed_weights import pack_weight

SUPPORTED = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

HALVES = (torch.float16, torch.bfloat16)

Mask = Tensor | dict[str, Tensor | None] | None
"""One mask, a mask for each kind of layer, or no mask."""

Pass = Callable[[Tensor, Tensor, Mask, Cache], Tensor]
"""A function (ids, positions, mask, slots) -> logits, see `FastForward.__call__`."""

Product = Callable[[Tensor], Tensor]
Keep = Callable[[Callable[[], Tensor]], Tensor]
"""A function that makes a copy of weights, and remembers how to make it again."""
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Block:
    """The functions of one layer. Each maps hidden states (B, T, width)."""

    before: Norm
    attend: Product
    heads: Sequence[Norm]
    out: Product
    between: Norm
    widen: Product
    narrow: Product


class FastForward:
    """A forward pass that returns the logits (B, V) after the last of (B, T) ids. It equals `model(...)` up to rounding.

    Args:
        model: a model of a `SUPPORTED` type, or one under PEFT.
        own: True if only this pass reads the weights and they never change. The pass may then make a second, packed copy of
            them.
        adapter: PEFT's name of the active adapter; empty without PEFT.
    """

    def __init__(self, model: Any, own: bool, adapter: str = "") -> None:
        core = model.get_base_model() if adapter else model
        config = core.config
        self._copies: list[tuple[Tensor, Callable[[], Tensor]]] = []

        def keep(make: Callable[[], Tensor]) -> Tensor:
            copied = make()
            if copied.device.type != "cpu":  # a CPU may pack it, and then keeps no other copy
                self._copies.append((copied, make))
            return copied

        def product(*layers: nn.Module) -> Product:
            return _product(layers, own, adapter, core.model.embed_tokens.weight.dtype, keep)

        self._embed = core.model.embed_tokens
        self._angles = core.model.rotary_emb
        self._activation = core.model.layers[0].mlp.act_fn
        self._head_dim = core.model.layers[0].self_attn.head_dim
        self._shares = (config.num_attention_heads, config.num_key_value_heads)
        self._blocks = [_block(layer, product) for layer in core.model.layers]
        self._norm = _norm(core.model.norm)
        self._head = product(core.lm_head)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Mask, slots: Cache) -> Tensor:
        """Return the logits (B, V) after the last token of each row.

        The keys and values of earlier tokens are read from the slots. Those of the new tokens are written into the slots.

        Args:
            ids: (B, T).
            positions: (B, T).
            mask: (B, 1, T, L) bool, True if a token may attend to one of the L tokens in the slots. None: each token attends to
                itself and all earlier tokens.
            slots: a cache prepared with `prefill` or `extend` (`inference.kv_cache`).
        """
        hidden = self._embed(ids)
        cos, sin = self._rotary_factors(hidden, positions)
        assert not isinstance(mask, dict)  # all its layers are of one kind
        bias = None if mask is None else _bias(mask, hidden.dtype)
        for number, block in enumerate(self._blocks):
            hidden = hidden + block.out(self._attend(block, number, block.before(hidden), cos, sin, bias, slots))
            gate, up = block.widen(block.between(hidden)).chunk(2, dim=-1)
            hidden = hidden + block.narrow(self._activation(gate) * up)
        logits: Tensor = self._head(self._norm(hidden[:, -1]))
        return logits

    def refresh(self) -> bool:
        """Read the weights again, into the memory that the pass already uses.

        Return False on a CPU: there, the packed copies of the weights cannot be written.
        """
        if self._embed.weight.device.type == "cpu":
            return False
        for copied, make in self._copies:
            copied.copy_(make())
        return True

    def _rotary_factors(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines of the rotary positions, (B, T, 1, head_dim) each.

        The first half of the sines is negated.
        """
        cos, sin = self._angles(hidden, positions)
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos[:, :, None], sin[:, :, None]

    def _attend(
        self, block: _Block, number: int, inputs: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None, slots: Cache
    ) -> Tensor:
        rows, length, _ = inputs.shape
        queries, shared = self._shares
        mixed = block.attend(inputs).view(rows, length, queries + 2 * shared, self._head_dim)
        turned, values = mixed[:, :, : queries + shared], mixed[:, :, queries + shared :]
        if block.heads:
            of_queries, of_keys = block.heads
            turned = torch.cat((of_queries(turned[:, :, :queries]), of_keys(turned[:, :, queries:])), dim=2)
        turned = torch.addcmul(turned * cos, turned.roll(self._head_dim // 2, -1), sin)
        keys, values = slots.update(turned[:, :, queries:].transpose(1, 2), values.transpose(1, 2), number)
        if length == 1:  # the heads that share keys are the rows of one query block
            query = turned[:, 0, :queries].view(rows, shared, queries // shared, self._head_dim)
            return _grouped_attention(query, keys, values, bias).reshape(rows, 1, -1)
        copies = wants_copies(inputs.device.type, inputs.dtype, bias is not None)
        out = scaled_attention(turned[:, :, :queries].transpose(1, 2), keys, values, bias, copies)
        return out.transpose(1, 2).reshape(rows, length, -1)


def is_supported(model: Any, adapter: str = "") -> bool:
    """Return True if `FastForward` can compute this model."""
    core = model.get_base_model() if adapter else model
    return type(core) in SUPPORTED and core.config._attn_implementation == "sdpa"


def transformers_pass(model: Any) -> Pass:
    """Return a `Pass` that calls transformers' own forward pass. It works for any model.

    The mask of this `Pass` must have the form that the model's attention takes.
    """
    parameter = cache_parameter(model)

    def run(ids: Tensor, positions: Tensor, mask: Mask, slots: Cache) -> Tensor:
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": True, parameter: slots}
        return kept_logits(model, 1, **inputs)[:, -1]

    return run


def _block(layer: Any, product: Callable[..., Product]) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    return _Block(
        before=_norm(layer.input_layernorm),
        attend=product(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=[_norm(attention.q_norm), _norm(attention.k_norm)] if "q_norm" in attention._modules else [],
        out=product(attention.o_proj),
        between=_norm(layer.post_attention_layernorm),
        widen=product(mlp.gate_proj, mlp.up_proj),
        narrow=product(mlp.down_proj),
    )


def _norm(module: Any) -> Norm:
    """Return the function of the root mean square norm (Zhang and Sennrich, arXiv 1910.07467) with the module's weight."""
    if module.weight.dtype == torch.float64:  # transformers' own computes in float32, with another result
        return module  # type: ignore[no-any-return]
    shape, eps = module.weight.shape, module.variance_epsilon

    def norm(hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, shape, module.weight, eps)

    return norm


def scaled_attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, copies: bool) -> Tensor:
    """Compute attention (B, H, T, D) for several tokens per row.

    Without a bias, each token attends to itself and all earlier tokens.

    Args:
        copies: whether to copy the shared keys and values (B, K, L, D) for each of the H heads.
    """
    heads_per_key = queries.shape[1] // keys.shape[1]
    if copies and heads_per_key > 1:
        keys, values = (states.repeat_interleave(heads_per_key, dim=1) for states in (keys, values))
    shared = queries.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=bias, is_causal=bias is None, enable_gqa=shared
    )


def wants_copies(device: str, dtype: torch.dtype, bias: bool) -> bool:
    """Return True if attention on a GPU must copy shared keys and values for each head.

    Without copies, torch would store the scores (B, H, T, L) of all heads. A GPU has a kernel for heads that share keys (not in
    float32) and a kernel for a bias, but no kernel for both.
    """
    return device != "cpu" and (bias or dtype not in HALVES)


def _grouped_attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Compute attention (B, K, G, D) of G queries over the same keys.

    On a CPU, two products are faster than the fused kernel.
    """
    if queries.device.type != "cpu" or queries.dtype not in (torch.float32, torch.float64):
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
    scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(2, 3))
    weights = (scores if bias is None else scores.add_(bias)).softmax(-1)
    return torch.matmul(weights, values)


def _product(layers: Sequence[Any], own: bool, adapter: str, dtype: torch.dtype, keep: Keep) -> Product:
    """Return a function from the common input of the layers to their outputs, concatenated and in the dtype.

    On a GPU the function casts adapters to the dtype.
    """
    if own:
        bias = None if layers[0].bias is None else keep(lambda: torch.cat([layer.bias for layer in layers]))
        return pack_weight(keep(lambda: torch.cat([layer.weight for layer in layers])), bias)
    tuned = [layer for layer in layers if adapter in getattr(layer, "lora_A", {})]
    if not tuned:
        return _concat_outputs(layers)
    base = _concat_outputs([layer.base_layer if layer in tuned else layer for layer in layers])
    # A CPU multiplies few rows by small matrices more slowly in 16 bits.
    own_dtype = tuned[0].lora_A[adapter].weight.dtype if layers[0].weight.device.type == "cpu" else dtype
    down = keep(lambda: torch.cat([layer.lora_A[adapter].weight for layer in tuned]).to(own_dtype))
    up = keep(lambda: _adapters_up(layers, tuned, adapter).to(own_dtype))

    def adapted(inputs: Tensor) -> Tensor:
        plain = base(inputs)
        return (plain + functional.linear(functional.linear(inputs.to(down.dtype), down), up)).to(plain.dtype)

    return adapted


def _adapters_up(layers: Sequence[Any], tuned: Sequence[Any], adapter: str) -> Tensor:
    """Return the up projections (O, R) of the layers' adapters as one block diagonal matrix; no columns for a layer without."""
    like = tuned[0].lora_B[adapter].weight
    parts = [
        layer.lora_B[adapter].weight * layer.scaling[adapter] if layer in tuned else like.new_empty(layer.out_features, 0)
        for layer in layers
    ]
    joined: Tensor = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
    return joined


def _concat_outputs(layers: Sequence[Any]) -> Product:
    if len(layers) == 1:
        return layers[0]  # type: ignore[no-any-return]
    return lambda inputs: torch.cat([layer(inputs) for layer in layers], dim=-1)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias for all layers: 0 if a token may attend to another one (the mask is True), else -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
