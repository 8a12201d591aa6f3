"""A decoder of the Llama shape on the model's own weights, with fewer and larger operations.

Llama, Qwen2, Qwen3 and Mistral differ only in biases and head norms. Their query, key and value projections become
one product, gate and up projections another; the joined weight replaces the parts, which stay in the model as
views of it, so nothing is stored twice and the stock forward still works on the same numbers (not with int8, where
the parts are given up).

A forward of a few tokens, most often one a session, is bound by memory: it runs on the native kernels, with
activations in fp32, where they can be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tenure.cache.attend import Forward, Singles
from tenure.errors import ModelError
from tenure.kernels.native import Native, native
from tenure.models.weights import Projection

FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class _Layer:
    """Weights of one decoder layer; norms in the model's dtype and, for the native kernels, in fp32."""

    norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class FusedDecoder:
    """Runs the layers of a Llama-shaped model.

    Args:
        model: the transformers model; its projection weights become views of joined ones.
        int8: store the projections, and the output layer's, in int8.

    Raises:
        ModelError: int8 without native kernels, or with a model that they do not take.
    """

    def __init__(self, model: Any, *, int8: bool = False) -> None:
        config = model.config.get_text_config()
        obstacle = _obstacle(model)
        self._native = native() if obstacle is None else None
        if int8 and self._native is None:
            cause, way_out = obstacle or ("which need a C compiler", "Install gcc or clang")
            raise ModelError(
                f"int8 weights need the native kernels, {cause}",
                option="weights",
                way_out=f"{way_out}, or leave the option out",
            )
        _own(model, int8)
        self._embed = model.model.embed_tokens
        self._eps = float(config.rms_norm_eps)
        self._activation = model.model.layers[0].mlp.act_fn
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._layers = [_layer(block, int8) for block in model.model.layers]
        self._head_dim = self._layers[0].out.weight.shape[1] // self._heads
        self._norm = model.model.norm.weight
        self._logits = Projection.of(model.lm_head.weight.data, model.lm_head.bias, int8=int8)
        if int8 and model.lm_head.weight is not self._embed.weight:
            _give_up(model.lm_head)
        self._few_tokens = 0 if self._native is None else self._native.few(self._logits.weight.dtype)
        self._fp32: dict[int, Tensor] = {}

    def tensors(self) -> Iterator[Tensor]:
        """What the projections are stored in, biases and scales included."""
        of_layers = ((one.qkv, one.out, one.gate_up, one.down) for one in self._layers)
        for projection in (*chain.from_iterable(of_layers), self._logits):
            for tensor in (projection.weight, projection.bias, projection.scale):
                if tensor is not None:
                    yield tensor

    def output_projection(self, layer: int) -> Projection:
        """What joins the heads of a layer."""
        return self._layers[layer].out

    def __call__(self, ids: Tensor, work: Forward, logit_rows: Tensor) -> Tensor:
        """Logits ``[len(logit_rows), vocabulary]`` fp32 of token ids ``[T]``."""
        kernels = self._native
        singles = None if kernels is None else Singles.of(work, kernels, self._heads)
        if kernels is not None and len(ids) <= self._few_tokens:
            hidden = self._few(kernels, ids, work, singles)[logit_rows]
            out = torch.empty(len(hidden), self._logits.outputs)
            return self._logits.few(kernels, hidden, out) if len(hidden) else out
        hidden = self._many(ids, work, singles)[logit_rows]
        return self._logits(hidden).float()

    def _many(self, ids: Tensor, work: Forward, singles: Singles | None) -> Tensor:
        hidden = self._embed(ids)
        more: Tensor | None = None
        for index, layer in enumerate(self._layers):
            hidden, x = self._added(hidden, more, layer.norm)
            qkv = layer.qkv(x).view(len(x), -1, self._head_dim)
            q, k, v = torch.split(qkv, [self._heads, self._kv_heads, self._kv_heads], 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            attended = work.attend(index, q, k, v, singles)
            hidden, x = self._added(hidden, layer.out(attended.flatten(1)), layer.mlp_norm)
            more = layer.down(self._gated(layer.gate_up, x))
            del qkv, q, k, v, attended, x  # else they would stand beside those of the next layer
        return self._added(hidden, more, self._norm)[1]

    def _added(self, hidden: Tensor, more: Tensor | None, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of two residual states, and it normed; ``hidden`` may be used for the sum."""
        if self._native is not None and hidden.dtype == torch.bfloat16:
            return hidden, self._native.norm_rows(hidden, self._in_fp32(norm), self._eps, more)
        hidden = hidden if more is None else hidden + more
        return hidden, self._rms(hidden, norm)

    def _gated(self, projection: Projection, x: Tensor) -> Tensor:
        if self._native is not None and x.dtype == torch.bfloat16:
            return projection.gated(self._native, x)
        gate, up = projection(x).chunk(2, -1)
        activated: Tensor = self._activation(gate)
        return activated.mul_(up)

    def _few(self, kernels: Native, ids: Tensor, work: Forward, singles: Singles | None) -> Tensor:
        decodes = singles is not None and len(singles.work) == len(work.work)
        dtype = self._embed.weight.dtype
        hidden = self._embed(ids).float()
        tokens = len(hidden)
        heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
        x = torch.empty_like(hidden)
        qkv = torch.empty(tokens, heads + 2 * kv_heads, dim)
        attended = torch.empty(tokens, heads, dim)
        gated = torch.empty(tokens, self._layers[0].gate_up.outputs // 2)
        for index, layer in enumerate(self._layers):
            kernels.rms_norm(hidden, self._in_fp32(layer.norm), x, self._eps)
            layer.qkv.few(kernels, x, qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                for token in qkv:
                    for norm, part in (
                        (layer.q_norm, token[:heads]),
                        (layer.k_norm, token[heads : heads + kv_heads]),
                    ):
                        kernels.rms_norm(part, self._in_fp32(norm), part, self._eps)
            if decodes and singles is not None:
                singles.attend(index, qkv, attended)
            else:
                q, k, v = torch.split(qkv.to(dtype).transpose(0, 1), [heads, kv_heads, kv_heads])
                attended = work.attend(index, q, k, v, singles).float()
            layer.out.few(kernels, attended.view(tokens, -1), hidden, add=True)
            kernels.rms_norm(hidden, self._in_fp32(layer.mlp_norm), x, self._eps)
            layer.gate_up.few(kernels, x, gated, gated=True)
            layer.down.few(kernels, gated, hidden, add=True)
        return kernels.rms_norm(hidden, self._in_fp32(self._norm), x, self._eps)

    def _in_fp32(self, norm: Tensor) -> Tensor:
        known = self._fp32.get(id(norm))
        if known is None:
            known = self._fp32[id(norm)] = norm.float().contiguous()
        return known

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._native is not None and x.dtype == torch.bfloat16:
            return self._native.norm_rows(x.contiguous(), self._in_fp32(weight), self._eps)
        return torch.rms_norm(x, (x.shape[-1],), weight, self._eps)


def _obstacle(model: Any) -> tuple[str, str] | None:
    """Why the native kernels cannot run a model, and the way out; None where they can."""
    if model.device.type != "cpu":
        return "which run on a CPU only", "Use device cpu"
    if model.dtype not in (torch.bfloat16, torch.float32):
        given = str(model.dtype).removeprefix("torch.")
        return f"which compute in bf16 or fp32, not in {given}", "Use dtype bf16 or fp32"
    activation = getattr(model.config.get_text_config(), "hidden_act", None)
    if activation != "silu":
        return f"which know the activation silu, not {activation}", "Use another model"
    return None


def _own(model: Any, int8: bool) -> None:
    """Copy the weights that joining and rounding do not copy: they are views of the mapped weight file, all of which
    counts as the process's memory as long as one view of it is left."""
    joined = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
    copied = (*joined, "o_proj.weight", "down_proj.weight", "lm_head.weight") if int8 else joined
    if model.device.type == "cpu":
        for name, parameter in model.named_parameters():
            if not name.endswith(copied):
                parameter.data = parameter.data.clone()


def _layer(block: Any, int8: bool) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        norm=block.input_layernorm.weight,
        qkv=_join([attention.q_proj, attention.k_proj, attention.v_proj], int8),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        out=_join([attention.o_proj], int8),
        mlp_norm=block.post_attention_layernorm.weight,
        gate_up=_join([mlp.gate_proj, mlp.up_proj], int8),
        down=_join([mlp.down_proj], int8),
    )


def _join(parts: list[nn.Linear], int8: bool) -> Projection:
    """Join projections of one input; the parts become views of the result, or are given up with int8."""
    if len(parts) == 1:
        weight, bias = parts[0].weight.data, None if parts[0].bias is None else parts[0].bias.data
    else:
        weight = torch.cat([part.weight.data for part in parts])
        bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    start = 0
    for part in parts:
        stop = start + part.out_features
        if int8:
            _give_up(part)
        else:
            part.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return Projection.of(weight, bias, int8=int8)


def _give_up(part: nn.Linear) -> None:
    """Empty a weight that is stored elsewhere; a view of no rows would keep all of it in memory."""
    part.weight = nn.Parameter(part.weight.new_empty(0, part.in_features), requires_grad=False)
