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
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "minimax_m2",
    "ministral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Model types that run on transformers' own layers."""

FAMILIES = (*FUSED_FAMILIES, *STOCK_FAMILIES)
"""Model types whose rotary layout is split-half, with nothing between rotation and attention; some rotate a part of
each head, some not in every layer, or by other angles in some layers."""


def tenure_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tenure: Forward,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in each layer: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return tenure.attend(layer, query[0], key[0], value[0], sinks=s_aux)[None], None


class IdentityRotary(nn.Module):
    """Stands in for a model's rotary module: cos 1 and sin 0 leave queries and keys as they are.

    Args:
        width: channels that the model rotates.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
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
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"{', '.join(sorted(kinds))} layers keep something else than keys and values of single tokens",
            option=option,
            way_out="Use a checkpoint with full attention or sliding windows in every layer",
        )


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Tokens that each layer of a supported model sees, the newest included; None for all. Empty where all see all."""
    config = config.get_text_config()
    size = getattr(config, "sliding_window", None)
    if not size or not getattr(config, "use_sliding_window", True):
        return ()
    slides = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = tuple(int(size) if kind == "sliding_attention" else None for kind in slides)
    return windows if any(windows) else ()


@dataclass(frozen=True)
class Adapter:
    """A loaded model behind the one call the engine makes.

    Args:
        model: a transformers causal language model in evaluation mode.
        ropes: the rotary embedding of each layer.
        layout: shape of its keys and values.
        scale: factor on the attention logits.
        run: the decoder: ids ``[T]``, a :class:`Forward` and the wanted columns to their fp32 logits.
        executor: ``fused`` or ``transformers``.
    """

    model: Any
    ropes: tuple[Rope, ...]
    layout: Layout
    scale: float
    run: Callable[[Tensor, Forward, Tensor], Tensor]
    executor: str

    @property
    def rope(self) -> Rope:
        """The rotary embedding of the layers that see the whole session, or of the first layer."""
        seeing = [rope for layer, rope in enumerate(self.ropes) if layer in self.layout.judges]
        return next((rope for rope in seeing if rope.inv_freq.any()), self.ropes[0])

    def turns(
        self, positions: Tensor, *, largest: int
    ) -> tuple[tuple[Tensor, Tensor], dict[int, tuple[Tensor, Tensor]]]:
        """Cosines and sines of the first layer, and of each layer that rotates by others.

        See :meth:`~tenure.models.rope.Rope.cos_sin`.
        """
        angles = {rope: rope.cos_sin(positions, largest=largest) for rope in dict.fromkeys(self.ropes)}
        first = self.ropes[0]
        return angles[first], {n: angles[rope] for n, rope in enumerate(self.ropes) if rope is not first}

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
            UnsupportedModelError: see :func:`check_supported` and :meth:`Rope.of_layers`; the model is as it was.
            ModelError: it is hooked already.
        """
        check_supported(model.config)
        config = model.config.get_text_config()
        windows = windows_of(config)
        fused = config.model_type in FUSED_FAMILIES and not windows
        if not fused and (executor == "fused" or weights == "int8"):
            raise UnsupportedModelError(
                "there is no fused executor for sliding windows"
                if windows
                else "this family has no fused executor",
                option=f"model {config.model_type}",
                way_out="Use executor 'auto' and weights 'auto'",
            )
        if isinstance(model.model.rotary_emb, IdentityRotary):
            raise ModelError(
                "an engine runs on this model already",
                option=f"model {config.model_type}",
                way_out="Load it again",
            )
        ropes = Rope.of_layers(model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layout = Layout(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_dim,
            dtype=model.dtype,
            device=model.device,
            windows=windows,
            alike=not windows and len(set(ropes)) == 1,
        )
        AttentionInterface.register(ATTENTION, tenure_attention)
        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION)
        # gpt-oss takes the angles of one half of the channels.
        width = ropes[0].rotary_dim // (2 if config.model_type == "gpt_oss" else 1)
        model.model.rotary_emb = IdentityRotary(width)
        run: Callable[[Tensor, Forward, Tensor], Tensor]
        if fused and executor != "transformers":
            run, name = FusedDecoder(model, int8=weights == "int8"), "fused"
        else:
            run, name = _StockDecoder(model), "transformers"
        scale = float(getattr(model.model.layers[0].self_attn, "scaling", head_dim**-0.5))
        return cls(model=model, ropes=ropes, layout=layout, scale=scale, run=run, executor=name)


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
