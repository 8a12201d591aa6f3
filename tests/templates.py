"""Chat templates of the kinds that are out there, and a small real tokenizer to try them with."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]
SPECIAL += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

# ChatML that writes a system text of its own when the list does not start with one.
CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Tool schemas in the system block, tool results merged into one user block; other roles vanish.
TOOLS = """\
{%- set first = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{{- '<|im_start|>system\n' + first }}
{%- if tools %}
{{- '\n\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
{%- set plain = m.role == 'assistant' and not m.tool_calls %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or plain %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Reasoning is shown after the last question and dropped before it; tool results are merged.
REASONING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'system' %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if content or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

# User and assistant must alternate; a system text is not taken at all.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

# The system text is written inside the last user message; tool schemas before it.
MOVING = """\
{%- if messages[0].role == 'system' %}{%- set rules = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if loop.last and rules is defined %}{{- '[INST] ' + rules + '\n\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- else %}{{- raise_exception('Only user and assistant roles, with an optional system message') }}
{%- endif %}
{%- endfor %}"""

# A start-of-text marker, headers, trimmed texts; tool results quoted as JSON.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'ipython' if m['role'] == 'tool' else m['role'] %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'tool' %}{{ m['content'] | tojson }}{% else %}{{ m['content'] | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

ALL = {
    "chatml": (CHATML, "<|im_start|>", "<|im_end|>"),
    "tools": (TOOLS, "<|endoftext|>", "<|im_end|>"),
    "reasoning": (REASONING, "<|endoftext|>", "<|im_end|>"),
    "strict": (STRICT, "<s>", "</s>"),
    "moving": (MOVING, "<s>", "</s>"),
    "headers": (HEADERS, "<|begin_of_text|>", "<|eot_id|>"),
}

_LINES = [
    "The quick brown fox jumps over the lazy dog. You are a helpful assistant.\n",
    "system user assistant tool\n\nBe helpful. What is the value of MAX_PARALLEL_SHARDS?\n",
    '{"name": "read_file", "arguments": {"path": "src/main.py"}}\n<tool_response>\n\n</tool_response>\n',
    "안녕하세요 세계 👨‍👩‍👧 é è ü 漢字 end end end\n",
]


@cache
def _backend(bos: str, add_bos: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES * 20, trainer)
    tokenizer.add_tokens(ADDED)
    if add_bos:
        place = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, place)]
        )
    return tokenizer


def tokenizer(name: str, *, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer with the template of that name; `add_bos`: it adds a start id itself."""
    template, bos, eos = ALL[name]
    fast = PreTrainedTokenizerFast(tokenizer_object=_backend(bos, add_bos), bos_token=bos, eos_token=eos)
    fast.chat_template = template
    return fast


def joint(
    tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, object]], prompt: bool = False, **options: object
) -> list[int]:
    """The template's own rendering of a conversation, encoded in one go."""
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **options)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
