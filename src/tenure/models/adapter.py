"""Runs an unmodified transformers model over Tenure's cache.

The model keeps its own projections, norms and MLPs. Two public hooks change what it does: the rotary module is
replaced by the identity, so that keys arrive raw, and an attention function registered under an own name does the
rotation and attends over the session's segments. transformers' own cache is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tenure.cache.attend import Forward
from tenure.cache.rows import Layout
from tenure.errors import ModelError, UnsupportedModelError
from tenure.models.fused import FUSED_FAMILIES, FusedDecoder
from tenure.models.rope import Rope

ATTENTION = "tenure"

STOCK_FAMILIES = (
    "arcee",
    "gemma",
    "glm4_moe",
    "granite",
    "granitemoe",
    "minimax_m2",
    "mixtral",
    "olmo",
    "olmo2",
    "olmoe",
    "phi",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "starcoder2",
)
"""Model types that run on transformers' own layers."""

FAMILIES = (*FUSED_FAMILIES, *STOCK_FAMILIES)
"""Model types whose rotary layout is split-half, with nothing between rotation and attention, and whose layers all
rotate and all see the whole session; some rotate a part of each head."""


def tenure_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tenure: Forward,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in each layer: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    out = tenure.attend(int(module.layer_idx), query[0], key[0], value[0])  # type: ignore[arg-type]
    return out[None], None


class IdentityRotary(nn.Module):
    """Stands in for a model's rotary module: cos 1 and sin 0 leave queries and keys as they are.

    Args:
        width: channels that the model rotates.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[1, 1, width]`` each, broadcast over the tokens."""
        return x.new_ones(1, 1, self.width), x.new_zeros(1, 1, self.width)


def unknown_family(model_type: str) -> UnsupportedModelError:
    """The error for a family that is not among ``FAMILIES``."""
    return UnsupportedModelError(
        "this family is not supported",
        option=f"model {model_type}",
        way_out="Use a model of one of these families: " + ", ".join(FAMILIES),
    )


def check_supported(config: Any) -> None:
    """Refuse, by name, what cannot be reproduced exactly.

    Raises:
        UnsupportedModelError: the message says which part it is and what to use instead.
    """
    config = config.get_text_config()
    option = f"model {config.model_type}"
    if config.model_type not in FAMILIES:
        raise unknown_family(config.model_type)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        other = ", ".join(sorted(kinds - {"full_attention"}))
        raise UnsupportedModelError(
            f"{other} layers do not see the whole session, so their slots cannot be kept by choice",
            option=option,
            way_out="Use a checkpoint with full attention in every layer",
        )
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        raise UnsupportedModelError(
            f"a sliding window of {config.sliding_window} hides old tokens by their index",
            option=option,
            way_out="Use a checkpoint without a window, such as Mistral v0.2 or later",
        )


@dataclass(frozen=True)
class Adapter:
    """A loaded model behind the one call the engine makes.

    Args:
        model: a transformers causal language model in evaluation mode.
        rope: its rotary embedding.
        layout: shape of its keys and values.
        scale: factor on the attention logits.
        run: the decoder: ids ``[T]``, a :class:`Forward` and the wanted columns to their fp32 logits.
        executor: ``fused`` or ``transformers``.
    """

    model: Any
    rope: Rope
    layout: Layout
    scale: float
    run: Callable[[Tensor, Forward, Tensor], Tensor]
    executor: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the forms they are stored in; what two of them share is counted once."""
        projections = self.run.tensors() if isinstance(self.run, FusedDecoder) else ()
        tensors = (*self.model.parameters(), *self.model.buffers(), *projections)
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def window(self) -> int | None:
        """Positions that the model was trained on; None where it does not tell, or its rotary scaling stretches them."""
        found = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(found) if found and self.rope.kind == "default" else None

    def output_projection(self, layer: int) -> Tensor | None:
        """What joins the heads of a layer, ``[hidden, heads, D]`` in the model's dtype; None where it cannot be read."""
        if isinstance(self.run, FusedDecoder):
            weight = self.run.output_projection(layer).dense(self.layout.dtype)
        else:
            attention = self.model.model.layers[layer].self_attn
            projection = getattr(attention, "o_proj", None) or getattr(attention, "dense", None)
            if projection is None:
                return None
            weight = projection.weight.detach()
        return weight.view(weight.shape[0], -1, self.layout.head_dim)

    @classmethod
    def attach(cls, model: Any, *, executor: str = "auto", weights: str = "auto") -> Adapter:
        """Hook a model that was loaded with any attention implementation.

        Args:
            model: ``AutoModelForCausalLM``.
            executor: ``auto``, ``fused`` or ``transformers``.
            weights: ``auto`` or ``int8``.

        Raises:
            UnsupportedModelError: see :func:`check_supported` and :meth:`Rope.of`; the model is as it was.
            ModelError: it is hooked already.
        """
        check_supported(model.config)
        config = model.config.get_text_config()
        fused = config.model_type in FUSED_FAMILIES
        if not fused and (executor == "fused" or weights == "int8"):
            raise UnsupportedModelError(
                "this family has no fused executor",
                option=f"model {config.model_type}",
                way_out="Use executor 'auto' and weights 'auto'",
            )
        if isinstance(model.model.rotary_emb, IdentityRotary):
            raise ModelError(
                "an engine runs on this model already",
                option=f"model {config.model_type}",
                way_out="Load it again",
            )
        rope = Rope.of(model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layout = Layout(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        AttentionInterface.register(ATTENTION, tenure_attention)
        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION)
        model.model.rotary_emb = IdentityRotary(rope.rotary_dim)
        run: Callable[[Tensor, Forward, Tensor], Tensor]
        if fused and executor != "transformers":
            run, name = FusedDecoder(model, int8=weights == "int8"), "fused"
        else:
            run, name = _StockDecoder(model), "transformers"
        scale = float(getattr(model.model.layers[0].self_attn, "scaling", head_dim**-0.5))
        return cls(model=model, rope=rope, layout=layout, scale=scale, run=run, executor=name)


@dataclass(frozen=True)
class _StockDecoder:
    """transformers' own forward."""

    model: Any

    def __call__(self, ids: Tensor, work: Forward, logit_rows: Tensor) -> Tensor:
        # Causality and rotation are ours; position ids only keep the model from deriving its own.
        positions = torch.zeros_like(ids)[None]
        logits: Tensor = self.model(
            input_ids=ids[None],
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logit_rows if len(logit_rows) else torch.tensor([len(ids) - 1]),
            tenure=work,
        ).logits
        return logits[0, : len(logit_rows)].float()
