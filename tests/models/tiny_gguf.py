"""Tiny GGUF files, written with the gguf package from random models, and wheels that carry them."""

from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tenure.models.catalog import CatalogModel, Wheel

if TYPE_CHECKING:
    from pathlib import Path

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<\uff5cnote\uff5c>")
USER_DEFINED = ("<tool_call>",)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ("h e", "l l", "he ll", "hell o", "\u0120 \u0120", "\u0120 w")


def byte_alphabet() -> list[str]:
    """GPT-2's printable character of every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def vocabulary() -> list[str]:
    return [*byte_alphabet(), *("".join(merge.split()) for merge in MERGES), *MARKERS, *USER_DEFINED]


def tiny_config(family: str = "llama", **options: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return getattr(transformers, f"{family.capitalize()}Config")(**{**sizes, **options})


def tiny_model(family: str = "llama", seed: int = 0, **options: Any) -> Any:
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, f"{family.capitalize()}ForCausalLM")(tiny_config(family, **options))
    return model.eval()


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k in files of the llama family."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    *,
    output: torch.Tensor | None = None,
    rope_freqs: list[float] | None = None,
    extra: dict[str, Any] | None = None,
    pre: str = "gpt-2",
    add_bos: bool = False,
    quantize: bool = False,
    without: str = "",
) -> Path:
    """Write ``model`` as a GGUF file; ``output`` is stored as the output projection if given."""
    import gguf

    config, family = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(50_000.0)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in MARKERS else 4 if t in USER_DEFINED else 1 for t in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHATML)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {k: v for k, v in model.state_dict().items() if k not in ("lm_head.weight", without)}
    if output is not None:
        state["lm_head.weight"] = output
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        part = stem.rpartition(".")[2]
        if family == "llama" and part in heads and tensor.dim() == 2:
            tensor = _interleave(tensor, heads[part])
        array = tensor.detach().float().contiguous().numpy()
        if quantize and array.ndim == 2:
            coarse = name != "lm_head.weight"
            form = gguf.GGMLQuantizationType.Q5_0 if coarse else gguf.GGMLQuantizationType.Q8_0
            array = gguf.quantize(array, form)
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", array, raw_dtype=form)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", array)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, project: str, member: str, data: bytes, version: str = "1.0") -> Path:
    """A wheel of ``project`` that pip accepts, with one data file."""
    package = project.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path


def catalog_entry(gguf_file: Path, index: Path, name: str = "tiny", pieces: int = 3) -> CatalogModel:
    """Cut ``gguf_file`` into wheels in ``index``, and describe them."""
    data = gguf_file.read_bytes()
    size = -(-len(data) // pieces)
    wheels = []
    for n in range(pieces):
        project, member = f"tenure-test-{name}-part{n + 1}", f"data/part{n + 1}.bin"
        wheel = write_wheel(index, project, member, data[n * size : (n + 1) * size])
        wheels.append(Wheel(project, "1.0", member, wheel.stat().st_size))
    return CatalogModel(
        name=name,
        wheels=tuple(wheels),
        sha256=hashlib.sha256(data).hexdigest(),
        gguf_bytes=len(data),
        parameters=100_000,
        tie_word_embeddings=True,
        licence="Apache-2.0",
        hub_id="org/tiny",
        quantization="F32",
    )
