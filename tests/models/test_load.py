"""Folders that look like models and are not: each is refused by name, none runs on random numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tenure import Engine
from tenure.errors import ModelError, UnsupportedModelError
from tenure.models.folder import inspect_folder
from tests.conftest import random_ids, stock_logits, tiny_model
from tests.templates import tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    fast = tokenizer("chatml")
    tiny_model("llama", layers=2, vocab_size=len(fast)).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename(folder: Path, change: Any) -> None:
    """Keep each weight under the name that ``change`` gives it, none where that is None."""
    path = folder / "model.safetensors"
    state = {new: tensor for name, tensor in load_file(path).items() if (new := change(name))}
    save_file(state, path, metadata={"format": "pt"})


def loaded(folder: Path, **options: Any) -> Engine:
    return Engine.load(folder, dtype="fp32", **options)


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_folder_loads(folder: Path, tied: bool) -> None:
    if tied:
        configure(folder, tie_word_embeddings=True)
        rename(folder, lambda name: name if name != "lm_head.weight" else None)
    engine = loaded(folder)
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(engine.adapter.model.model.embed_tokens.weight, stored)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda name: None if "layers.1.mlp" in name else name,
            "3 weights .* not in its files, such as model.layers.1.mlp",
        ),
        (lambda name: "student." + name, "21 weights .* not in its files, such as lm_head.weight"),
        (
            lambda name: None if name == "lm_head.weight" else name.removeprefix("model."),
            "1 weights .* lm_head.weight",
        ),
    ],
    ids=["a layer's", "all", "the head's"],
)
def test_missing_weights_are_named(folder: Path, change: Any, words: str) -> None:
    rename(folder, change)
    with pytest.raises(ModelError, match=words):
        loaded(folder)


def test_left_over_weights_are_named(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"9 weights in the files have no place .* model.layers.1"):
        loaded(folder)


def test_weights_beside_the_decoder_do_no_harm(folder: Path) -> None:
    path = folder / "model.safetensors"
    more = {
        "v_head.summary.weight": torch.zeros(1, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    loaded(folder)


def test_a_shape_that_does_not_fit_is_named(folder: Path) -> None:
    configure(folder, intermediate_size=128)
    with pytest.raises(ModelError, match=r"mlp.down_proj.weight has the shape \(64, 96\) .* \(64, 128\)"):
        loaded(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "retnet9"}, "model retnet9: this family is not supported"),
        (
            {"model_type": "retnet9", "auto_map": {"AutoConfig": "c.C"}},
            "model retnet9: this family is not supported",
        ),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "gpt2"}, "model gpt2: this family is not supported"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantised \(awq\)"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            r"quantised \(bitsandbytes\)",
        ),
        ({"hidden_size": "wide"}, "configuration cannot be read"),
        ({"num_attention_heads": 0}, "configuration cannot be read"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "'dynamic'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_run_is_refused_before_its_weights_are_read(
    folder: Path, config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.models.load.load_weights", lambda *_: pytest.fail("read"))
    configure(folder, **config)
    with pytest.raises(ModelError, match=words):
        loaded(folder)


def test_a_refused_family_is_unsupported(folder: Path) -> None:
    configure(folder, model_type="retnet9")
    with pytest.raises(UnsupportedModelError):
        loaded(folder)


def test_of_a_model_that_reads_pictures_the_language_model_is_run(tmp_path: Path) -> None:
    fast = tokenizer("chatml")
    text = {"vocab_size": len(fast), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 24}
    eyes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text | heads,
        vision_config=eyes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **{f"{kind}_token_index": number for number, kind in enumerate(("image", "boi", "eoi"))},
    )
    stock = transformers.Gemma3ForConditionalGeneration(config).eval()
    stock.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    engine = loaded(tmp_path)
    ids = random_ids(60)
    logits = engine.session(policy="full", positions="logical").feed(ids)
    torch.testing.assert_close(logits, stock_logits(stock, ids), atol=1e-4, rtol=0)
    assert engine.adapter.weight_bytes < sum(p.nbytes for p in stock.parameters()), "no eyes"


def test_experts_in_four_bits_are_unpacked(tmp_path: Path) -> None:
    """gpt-oss as it is published: blocks of 32 numbers of 4 bits with an exponent each."""
    fast = tokenizer("chatml")
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64}
    stock = tiny_model("gpt_oss", vocab_size=len(fast), **sizes)
    count = sum(p.numel() for p in stock.parameters())
    stock.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in state if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, rows, columns = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (experts, columns, rows // 32), dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
        whole = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        stock.get_parameter(name).data.copy_(whole)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    engine = loaded(tmp_path)
    ids = random_ids(60)
    logits = engine.session(policy="full", positions="logical").feed(ids)
    torch.testing.assert_close(logits, stock_logits(stock, ids), atol=1e-4, rtol=0)
    assert inspect_folder(tmp_path).parameters == count


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_without_a_tokenizer(folder: Path, family: str) -> None:
    configure(folder, model_type=family)
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        loaded(folder)


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        loaded(folder)


def test_the_command_line_says_it_without_a_traceback(folder: Path) -> None:
    from typer.testing import CliRunner

    from tenure.cli import app

    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    result = CliRunner().invoke(app, ["chat", "--model", str(folder)], input="hello\n")
    assert result.exit_code == 2
    assert "quantised (gptq)" in " ".join(result.stderr.split())
