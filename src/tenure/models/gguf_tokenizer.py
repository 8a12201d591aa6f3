"""The tokenizer of a GGUF file, saved so that it gives the ids of the original model's tokenizer.

transformers builds it; its versions differ in what they lose on the way (markers cut into pieces, a BOS that
the file does not ask for, the wrong end of sequence). What the file or the original says is put back here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tenure.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from tenure.models.gguf_file import GgufTokens

# Details of original tokenizers that the name of a pre-tokenizer stands for and transformers leaves out.
_NFC = ("qwen2",)
_SINGLE_DIGITS = ("smollm", "starcoder")  # split off before spaces are grouped: "  1" is "  " + "1"
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is taken whole
_SAMPLE = "def f(x):\n\treturn  12 ** 2  # cafe\u0301 \u65e5\u672c\u8a9e \U0001f600\r\n\n  I'll\u00a0don't"


def save_tokenizer(gguf: Path, tokens: GgufTokens, target: Path) -> list[int]:
    """Save the tokenizer and its chat template into ``target``; the ids that end a turn, the main one first.

    The folder loads with ``AutoTokenizer`` of transformers 4 and 5 to the same ids.

    Raises:
        ModelError: the file has no tokenizer that transformers can read, or a token does not survive saving.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"the file's tokenizer cannot be read: {error}", option=str(gguf)) from error
    backend = _with_marker_texts(loaded.backend_tokenizer, tokens)
    _restore(backend, tokens)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=loaded.chat_template,
        clean_up_tokenization_spaces=False,
        **tokens.special,
    ).save_pretrained(target)
    _literal_class(target / "tokenizer_config.json")
    saved = AutoTokenizer.from_pretrained(target)
    _check(gguf, tokens, backend, saved)
    return stop_ids(saved, tokens.eot_id)


def _with_marker_texts(backend: Any, tokens: GgufTokens) -> Any:
    """Give markers such as ``<\uff5cUser\uff5c>`` their own text back.

    Byte-level vocabularies spell every token in a byte alphabet, markers excepted. transformers respells all
    tokens with other characters, and so turns these markers into text that never matches.
    """
    wrong = {text: index for text, (index, _) in tokens.markers.items() if backend.token_to_id(text) != index}
    if not wrong or tokens.model != "gpt2":
        return backend
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    spelled = {index: text for text, index in vocab.items()}
    merged = {"".join(pair) for pair in state["model"]["merges"]}
    for text, index in wrong.items():
        if (
            index in spelled and spelled[index] not in merged
        ):  # else an ordinary token that is marked by mistake
            del vocab[spelled[index]]
            vocab[text] = index
    return Tokenizer.from_str(json.dumps(state))


def _restore(backend: Any, tokens: GgufTokens) -> None:
    from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

    if tokens.model == "gpt2":
        backend.normalizer = normalizers.NFC() if tokens.pre in _NFC else None
        backend.decoder = decoders.ByteLevel()
        if tokens.pre in _SINGLE_DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
            )
        if tokens.pre in _IGNORE_MERGES:
            backend.model.ignore_merges = True
    backend.post_processor = _post_processor(tokens)
    for text, (index, control) in tokens.markers.items():
        if backend.token_to_id(text) == index and backend.encode(text, add_special_tokens=False).ids != [
            index
        ]:
            token = AddedToken(text, normalized=False, special=control)
            backend.add_special_tokens([token]) if control else backend.add_tokens([token])


def _post_processor(tokens: GgufTokens) -> Any:
    """Adds BOS and EOS as the file says, and only when special tokens are asked for."""
    from tokenizers import processors

    bos = tokens.special.get("bos_token") if tokens.add_bos else None
    eos = tokens.special.get("eos_token") if tokens.add_eos else None

    def wrap(sequence: str, kind: int) -> list[str]:
        return [f"{part}:{kind}" for part in (bos, sequence, eos) if part]

    ids = {text: tokens.markers[text][0] for text in (bos, eos) if text in tokens.markers}
    return processors.TemplateProcessing(
        single=wrap("$A", 0), pair=wrap("$A", 0) + wrap("$B", 1), special_tokens=list(ids.items())
    )


def _literal_class(path: Path) -> None:
    """Name the class that takes ``tokenizer.json`` literally, as transformers 4 and 5 both know it."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["tokenizer_class"] = "PreTrainedTokenizerFast"
    data["model_input_names"] = ["input_ids", "attention_mask"]
    for key in ("is_local", "local_files_only", "backend", "name_or_path"):
        data.pop(key, None)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check(gguf: Path, tokens: GgufTokens, backend: Any, saved: Any) -> None:
    """What was saved must give the ids of what was built, and every marker its one id."""
    for text in (_SAMPLE, *tokens.markers):
        ids = saved.encode(text, add_special_tokens=False)
        if ids != backend.encode(text, add_special_tokens=False).ids:
            raise ModelError(f"the saved tokenizer reads {text!r} in another way", option=str(gguf))
        known = text in tokens.markers and backend.token_to_id(text) == tokens.markers[text][0]
        if known and len(ids) != 1:
            raise ModelError(f"the marker {text!r} is cut into {len(ids)} tokens", option=str(gguf))


def stop_ids(tokenizer: Any, eot_id: int | None = None) -> list[int]:
    """Ids that end a turn: first that of the chat template, then the ends of sequence and of document.

    Args:
        tokenizer: a transformers tokenizer.
        eot_id: one more, from the metadata of the model's file.
    """
    found = [end_of_turn_id(tokenizer), tokenizer.eos_token_id, eot_id]
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    found += [added.get(text) for text in ("<|endoftext|>", "<|end_of_text|>")]
    return list(dict.fromkeys(int(index) for index in found if index is not None))


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The added token that the chat template writes right after an assistant's answer, or None."""
    if not tokenizer.chat_template:
        return None
    answer = "tenure-answer-7f3a"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # templates are programs and may refuse anything; the end of sequence still stops
        return None
    tail = text.rpartition(answer)[2].lstrip()
    ids = tokenizer.encode(tail, add_special_tokens=False) if tail else []
    return int(ids[0]) if ids and ids[0] in tokenizer.added_tokens_decoder else None
