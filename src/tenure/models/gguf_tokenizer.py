"""The tokenizer of a GGUF file, saved so that every load gives the ids of the original model (case: markers that are
cut into pieces, a second BOS, turn ends that do not stop)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenure.errors import ModelError
from tenure.models.gguf_file import GgufFacts

# The original tokenizers of these pre-tokenizers apply Unicode NFC; a GGUF file has no place for it.
_NFC = ("qwen2",)
_SAMPLE = "def f(x):\n\treturn x ** 2 + 1234  # caf\u00e9, na\u0131ve \u65e5\u672c\u8a9e \U0001f600\r\n\n  I'll\u00a0don't"


def save_tokenizer(gguf: Path, facts: GgufFacts, target: Path) -> list[int]:
    """Save the tokenizer and its chat template into ``target``; the ids that end a turn, the main one first.

    Raises:
        ModelError: the file has no tokenizer, or its markers do not survive saving.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"the file's tokenizer cannot be read: {error}", option=str(gguf)) from error
    backend = loaded.backend_tokenizer
    _add_markers(backend, facts)
    if facts.pre_tokenizer in _NFC:
        from tokenizers import normalizers

        backend.normalizer = normalizers.NFC()
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: str(getattr(loaded, name)) for name in names if getattr(loaded, name) is not None}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=loaded.chat_template,
        clean_up_tokenization_spaces=False,
        **special,
    )
    fast.save_pretrained(target)
    _fix_class(target / "tokenizer_config.json")
    saved = AutoTokenizer.from_pretrained(target)
    _check(gguf, facts, fast, saved)
    return stop_ids(saved, facts.eot_id)


def _add_markers(backend: Any, facts: GgufFacts) -> None:
    """Make every control and user-defined token one id; older versions of transformers add only some."""
    from tokenizers import AddedToken

    for text, (index, control) in facts.markers.items():
        if backend.token_to_id(text) == index and backend.encode(text, add_special_tokens=False).ids != [index]:
            token = AddedToken(text, normalized=False, special=control)
            backend.add_special_tokens([token]) if control else backend.add_tokens([token])


def _fix_class(path: Path) -> None:
    """Name the class that reads ``tokenizer.json`` literally, under the name that transformers 4 and 5 both know."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("is_local", "local_files_only", "backend", "name_or_path"):
        data.pop(key, None)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check(gguf: Path, facts: GgufFacts, before: Any, after: Any) -> None:
    for text in (_SAMPLE, *facts.markers):
        ids = before.encode(text, add_special_tokens=False)
        if after.encode(text, add_special_tokens=False) != ids:
            raise ModelError(f"the saved tokenizer reads {text!r} otherwise than the file's", option=str(gguf))
        if text in facts.markers and before.convert_tokens_to_ids(text) == facts.markers[text][0] and len(ids) != 1:
            raise ModelError(f"the marker {text!r} is cut into {len(ids)} tokens", option=str(gguf))


def stop_ids(tokenizer: Any, eot_id: int | None = None) -> list[int]:
    """Ids that end a turn: the tokenizer's end of sequence, the token that its chat template writes after an answer,
    and the end of a document.

    Args:
        tokenizer: a transformers tokenizer.
        eot_id: one more, from the metadata of the model's file.
    """
    found = [end_of_turn_id(tokenizer), tokenizer.eos_token_id, eot_id]
    unknown = tokenizer.unk_token_id
    for text in ("<|endoftext|>", "<|end_of_text|>"):
        index = tokenizer.convert_tokens_to_ids(text)
        found.append(None if index == unknown and tokenizer.unk_token != text else index)
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
