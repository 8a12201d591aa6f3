"""A converted folder is the model and the tokenizer of the GGUF file (C24)."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tenure.errors import ModelError, UnsupportedModelError
from tenure.models.convert import convert_gguf
from tenure.models.gguf_file import read_gguf
from tests.models.tiny_gguf import CHATML, MARKERS, USER_DEFINED, tiny_model, vocabulary, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

IDS = torch.arange(3, 60).unsqueeze(0)
TEXT = "hello world\n\n  hello 12   345 caf\u00e9 \u65e5\u672c \U0001f600 I'll\r\n\tx"


def convert(gguf: Path, **options: Any) -> Path:
    target = gguf.parent / "out"
    target.mkdir()
    convert_gguf(gguf, target, **options)
    return target


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "size"),
    [("llama", {}), ("llama", {"head_dim": 24}), ("qwen2", {})]
    + [("qwen3", {"head_dim": size}) for size in (16, 24)],
)
def test_logits_equal_those_of_the_model_that_was_written(
    tmp_path: Path, family: str, size: dict[str, int]
) -> None:
    model = tiny_model(family, rope_theta=50_000.0, **size)
    model = type(model)(_theta(model.config)).eval()
    folder = convert(write_gguf(tmp_path / "m.gguf", model))
    found = load(folder)
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, model(IDS).logits)
    assert found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in found.parameters()) == sum(p.numel() for p in model.parameters())


def _theta(config: Any) -> Any:
    """The configuration with the file's rotary base, in whichever form this transformers has."""
    data = config.to_dict()
    data["rope_theta"] = 50_000.0
    if "rope_parameters" in data:
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": 50_000.0}
    return type(config)(**data)


def test_separate_output_stays_separate(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    folder = convert(write_gguf(tmp_path / "m.gguf", model, output=model.lm_head.weight))
    found = load(folder)
    assert found.config.tie_word_embeddings is False
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)
    assert torch.equal(found.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("tied", [None, True])
def test_two_precisions_of_one_matrix_become_the_finer_one(tmp_path: Path, tied: bool | None) -> None:
    model = tiny_model()
    matrix = model.model.embed_tokens.weight.detach()
    path = write_gguf(tmp_path / "m.gguf", model, output=matrix, quantize=True)
    found = load(convert(path, tied=tied), torch.bfloat16)
    assert found.config.tie_word_embeddings is True
    assert found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
    error = (found.lm_head.weight.float() - matrix).norm() / matrix.norm()
    assert error < 0.01  # Q5_0, the form of the embedding in this file, is at 0.03


def test_weights_that_are_missing_or_left_over_are_no_silent_matter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"1 weights .* not in the file.*up_proj"):
        convert(write_gguf(tmp_path / "m.gguf", tiny_model(), without="model.layers.1.mlp.up_proj.weight"))
    (tmp_path / "out").rmdir()
    biased = tiny_model(attention_bias=True)
    with pytest.raises(ModelError, match=r"the file holds .* weights"):
        convert(write_gguf(tmp_path / "m.gguf", biased))


def test_rotary_parameters_are_readable_by_both_forms(tmp_path: Path) -> None:
    data = json.loads((convert(write_gguf(tmp_path / "m.gguf", tiny_model())) / "config.json").read_text())
    assert data["rope_theta"] == 50_000.0
    assert data["rope_parameters"] == {"rope_type": "default", "rope_theta": 50_000.0}
    assert data["rms_norm_eps"] == 1e-6
    assert not {"_name_or_path", "quantization_config"} & set(data)


def llama3_factors(size: int, base: float, factor: float) -> list[float]:
    found = []
    for index in range(size):
        wavelength = 2 * math.pi * base ** (index / size)
        smooth = min(max((8192 / wavelength - 1) / 3, 0), 1)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def test_llama3_scaling_survives(tmp_path: Path) -> None:
    model = tiny_model(head_dim=16)
    factors = llama3_factors(8, 50_000.0, 32.0)
    folder = convert(write_gguf(tmp_path / "m.gguf", model, rope_freqs=factors))
    plain = 50_000.0 ** (-torch.arange(8) / 8)
    found = load(folder).model.rotary_emb.inv_freq
    torch.testing.assert_close(found, plain / torch.tensor(factors), rtol=1e-5, atol=0)


def test_unknown_rotary_factors_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(head_dim=16), rope_freqs=[1, 2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(UnsupportedModelError, match="rotary factors"):
        read_gguf(path)


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    key = "llama.rope.scaling"
    linear = {f"{key}.type": "linear", f"{key}.factor": 4.0}
    facts = read_gguf(write_gguf(tmp_path / "a.gguf", tiny_model(), extra=linear))
    assert facts.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    yarn = {f"{key}.type": "yarn", f"{key}.factor": 4.0, f"{key}.original_context_length": 128}
    facts = read_gguf(write_gguf(tmp_path / "b.gguf", tiny_model(), extra=yarn))
    assert facts.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    with pytest.raises(UnsupportedModelError, match="longrope"):
        read_gguf(write_gguf(tmp_path / "c.gguf", tiny_model(), extra={f"{key}.type": "longrope"}))


def test_the_older_key_of_linear_scaling(tmp_path: Path) -> None:
    for factor, scaling in ((4.0, {"rope_type": "linear", "factor": 4.0}), (1.0, None)):
        extra = {"llama.rope.scale_linear": factor}
        facts = read_gguf(write_gguf(tmp_path / "m.gguf", tiny_model(), extra=extra))
        assert facts.rope_scaling == scaling


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"rope.dimension_count": 8}, "rotates 8 of 16 channels"),
        ({"attention.sliding_window": 256}, "sliding window of 256"),
        ({"attention.scale": 0.5}, "scales attention by 0.5, not by 0.25"),
    ],
)
def test_attention_that_transformers_would_not_reproduce_is_refused(
    tmp_path: Path, extra: dict[str, Any], words: str
) -> None:
    named = {f"llama.{key}": value for key, value in extra.items()}
    with pytest.raises(UnsupportedModelError, match=words):
        read_gguf(write_gguf(tmp_path / "m.gguf", tiny_model(), extra=named))


def test_attention_that_says_what_it_is_anyway(tmp_path: Path) -> None:
    same = {"rope.dimension_count": 16, "attention.sliding_window": 512, "attention.scale": 0.25}
    read_gguf(write_gguf(tmp_path / "m.gguf", tiny_model(), extra={f"llama.{k}": v for k, v in same.items()}))


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "smollm", "llama-bpe"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_ids(tmp_path: Path, pre: str, add_bos: bool) -> None:
    tok = tokenizer(convert(write_gguf(tmp_path / "m.gguf", tiny_model(), pre=pre, add_bos=add_bos)))
    words = vocabulary()
    for marker in (*MARKERS, *USER_DEFINED):
        assert tok.encode(f"hello{marker}hello", add_special_tokens=False) == [
            words.index(part) for part in ("hello", marker, "hello")
        ]
    ids = tok.encode(TEXT, add_special_tokens=False)
    assert tok.decode(ids) == TEXT
    with_special = tok.encode(TEXT)
    assert with_special == [words.index("<|endoftext|>")] * add_bos + ids
    assert tok.special_tokens_map["eos_token"] == "<|endoftext|>"


def test_digits_are_split_before_spaces_are_grouped(tmp_path: Path) -> None:
    tok = tokenizer(convert(write_gguf(tmp_path / "m.gguf", tiny_model(), pre="smollm")))
    assert tok.convert_ids_to_tokens(tok.encode("  1", add_special_tokens=False)) == ["\u0120\u0120", "1"]


def test_unicode_normalisation_of_qwen(tmp_path: Path) -> None:
    tok = tokenizer(convert(write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), pre="qwen2")))
    assert tok.encode("e\u0301") == tok.encode("\u00e9")


def test_chat_template_and_stop_ids(tmp_path: Path) -> None:
    folder = convert(write_gguf(tmp_path / "m.gguf", tiny_model(), add_bos=True))
    tok, words = tokenizer(folder), vocabulary()
    assert tok.chat_template == CHATML
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [words.index("<|im_end|>"), words.index("<|endoftext|>")]


def test_conversation_has_whole_markers_and_no_second_bos(tmp_path: Path) -> None:
    tok = tokenizer(convert(write_gguf(tmp_path / "m.gguf", tiny_model(), add_bos=True)))
    roles = ("system", "user", "assistant", "tool", "assistant", "user")
    messages = [{"role": role, "content": f"hello {n}"} for n, role in enumerate(roles)]
    ids = tok.encode(tok.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    words = vocabulary()
    assert ids.count(words.index("<|im_start|>")) == ids.count(words.index("<|im_end|>")) == len(roles)
    assert ids.count(words.index("<|endoftext|>")) == 0
    assert not set("<|>") & set("".join(tok.convert_ids_to_tokens([i for i in ids if i < 256])))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize("keep", [4, 30, 2000, 0.5, 0.999])
def test_truncated(tmp_path: Path, keep: float) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(ModelError, match=r"m\.gguf: .*truncated"):
        read_gguf(path)


def test_other_families_are_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="mamba"):
        read_gguf(tmp_path / "m.gguf")
