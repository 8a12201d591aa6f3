"""Rotary position as metadata: angles in fp32 from the model's own inverse frequencies.

Keys are cached unrotated, so a position is an integer that may change at any time; the angle is applied when
keys and queries meet, once, from the raw key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenure.errors import UnsupportedModelError

STATIC_KINDS = ("default", "linear", "llama3", "yarn")
"""Rotary scalings whose frequencies do not depend on the length of the text."""

_FP32_POSITIONS = 16_384
"""Below this, angles are taken in fp32 as the stock model does; above, in fp64: an fp32 product is off by 4e-3
rad at 131K positions and by 4e-2 at 2M."""


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotary embedding of a model.

    Args:
        inv_freq: ``[r/2]`` fp32, scaled by the model's rotary scaling.
        attention_factor: on cos and sin, so that a logit carries its square (YaRN, arXiv 2309.00071); else 1.
        kind: one of ``STATIC_KINDS``.
    """

    inv_freq: Tensor
    attention_factor: float
    kind: str

    @classmethod
    def of_layers(cls, model: Any) -> tuple[Rope, ...]:
        """Read the rotary embeddings of a transformers model, one for each layer; layers that are alike share theirs.

        The model's rotary class is built anew from its config: a cast of the loaded model rounds its buffer.

        Raises:
            UnsupportedModelError: the frequencies depend on the length of the text, or are not rotary at all.
        """
        config = model.config.get_text_config()
        kinds = check_rope(config)
        with torch.device("cpu"):
            module = type(model.model.rotary_emb)(config=config)
        found = {}
        for layers, kind in kinds.items():
            prefix = f"{layers}_" if layers else ""
            inv_freq = getattr(module, f"{prefix}inv_freq").detach().float().to(model.device)
            found[layers] = cls(inv_freq, float(getattr(module, f"{prefix}attention_scaling")), kind)
        types = config.layer_types if "" not in found else [""] * config.num_hidden_layers
        still = cls(torch.zeros_like(found[types[0]].inv_freq), 1.0, found[types[0]].kind)
        return tuple(found[one] if turns else still for one, turns in zip(types, _turns(config), strict=True))

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return 2 * self.inv_freq.numel()

    def cos_sin(self, positions: Tensor, *, largest: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, the attention factor in both.

        Args:
            positions: integers of any shape ``[...]``.
            largest: an upper bound of the positions, to choose the precision without reading them.

        Returns:
            Two fp32 tensors ``[..., r/2]``.
        """
        dtype = torch.float32 if largest < _FP32_POSITIONS else torch.float64
        angles = positions.to(dtype)[..., None] * self.inv_freq.to(dtype)
        return (
            (angles.cos() * self.attention_factor).float(),
            (angles.sin() * self.attention_factor).float(),
        )


def _turns(config: Any) -> list[bool]:
    """For each layer whether it rotates at all."""
    if config.model_type == "exaone4" and config.sliding_window is not None:
        return [kind == "sliding_attention" for kind in config.layer_types]
    flags = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return [bool(turns) for turns in flags]  # the name says the opposite of what its values do


def check_rope(config: Any) -> dict[str, str]:
    """The kinds of a model's rotary scaling by the type of the layers, of the empty type where all layers share one.

    Raises:
        UnsupportedModelError: frequencies depend on the length of the text.
    """
    config = config.get_text_config()
    kinds = rope_kinds(config)
    for kind in kinds.values():
        if kind not in STATIC_KINDS:
            raise UnsupportedModelError(
                f"rotary scaling {kind!r} changes its frequencies with the length of the text, so cached keys "
                "would have to be computed again",
                option=f"model {config.model_type}",
                way_out="Use a checkpoint with default, linear, llama3 or yarn scaling, or set "
                "rope_scaling to one of these in its config.json",
            )
    return kinds


def rope_kinds(config: Any) -> dict[str, str]:
    """The names of a config's rotary scalings, in the words of transformers 5 and of 4; see :func:`check_rope`."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        used = set(config.layer_types)
        return {layers: _kind(of or {}) for layers, of in parameters.items() if layers in used}
    return {"": _kind(parameters)}


def _kind(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))
