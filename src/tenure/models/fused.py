"""A decoder of the Llama shape on the model's own weights, with fewer and larger operations.

Llama, Qwen2, Qwen3 and Mistral differ only in biases and head norms. Their query, key and value projections become
one product, gate and up projections another; the joined weight replaces the parts, which stay in the model as
views of it, so nothing is stored twice and the stock forward still works on the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tenure.cache.attend import Forward

FUSED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class _Layer:
    """Weights of one decoder layer; shapes as in the model, joined along the outputs."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FusedDecoder:
    """Runs the layers of a Llama-shaped model.

    Args:
        model: the transformers model; its projection weights become views of joined ones.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._embed = model.model.embed_tokens
        self._norm = model.model.norm.weight
        self._eps = float(config.rms_norm_eps)
        self._activation = model.model.layers[0].mlp.act_fn
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._layers = [_layer(block) for block in model.model.layers]
        self._head_dim = self._layers[0].out.shape[1] // self._heads

    def __call__(self, ids: Tensor, work: Forward) -> Tensor:
        """Hidden states ``[T, hidden]`` of token ids ``[T]``, after the last norm."""
        hidden = self._embed(ids)
        for index, layer in enumerate(self._layers):
            hidden = self._attention(index, layer, hidden, work)
            x = self._rms(hidden, layer.mlp_norm)
            gate, up = functional.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            hidden = hidden + functional.linear(self._activation(gate).mul_(up), layer.down, layer.down_bias)
        return self._rms(hidden, self._norm)

    def _attention(self, index: int, layer: _Layer, hidden: Tensor, work: Forward) -> Tensor:
        x = self._rms(hidden, layer.norm)
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self._head_dim)
        q, k, v = qkv.split([self._heads, self._kv_heads, self._kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
        out = work.attend(index, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        return hidden + functional.linear(out.flatten(1), layer.out, layer.out_bias)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, (x.shape[-1],), weight, self._eps)


def _layer(block: Any) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    qkv, qkv_bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _join([mlp.gate_proj, mlp.up_proj])
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        norm=block.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=block.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )


def _join(parts: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Join projections of one input; the parts become views of the result."""
    weight = torch.cat([part.weight.data for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    start = 0
    for part in parts:
        stop = start + part.out_features
        part.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return weight, bias
