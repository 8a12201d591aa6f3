"""An agent's tool loop with the openai client: one session, a fixed budget, only new tokens computed.

    tenure serve --model qwen2.5-coder-0.5b --budget 1024
    python examples/agent_loop.py

The client sends its whole history with every request, as agents do. Fields that only Tenure knows (``span``, ``pin``,
``step``, ``reads``, ``session_id``) may be left out; they say what the agent will need again.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_log",
            "description": "Read the log of one day.",
            "parameters": {
                "type": "object",
                "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 30}},
                "required": ["day"],
                "additionalProperties": False,
            },
        },
    }
]


def read_log(day: int) -> str:
    """The tool: a long text of which little matters."""
    lines = [
        f"day {day} {hour:02}:{minute:02} INFO shard check passed" for hour in range(8) for minute in (0, 30)
    ]
    lines.insert(9, f"day {day} 04:10 WARN {40 + day} shards are open")
    return "\n".join(lines)


def answer_calls(messages: list[dict[str, Any]]) -> None:
    """Refuse calls that nobody asked for; a history has a result for every call."""
    for call in messages[-1].get("tool_calls", ()):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Not now."})


def main() -> None:
    """Read a few logs, then answer from what was said before them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what `tenure serve keys add` printed")
    parser.add_argument("--days", type=int, default=6)
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You watch a cluster. Be brief.", "pin": True},
        {"role": "user", "content": "Remember: the shard limit is 48.", "span": "limit", "pin": True},
    ]

    def ask(**fields: Any) -> Any:
        reply = client.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]
            tools=TOOLS,  # type: ignore[arg-type]
            extra_body={"session_id": "shard-watch"},
            **fields,
        )
        usage = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        kept = usage.model_extra["tenure"]["resident"]
        print(f"  {usage.prompt_tokens:6} tokens sent, {cached:6} of them cached, {kept:5} slots resident")
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return reply.choices[0].message

    for day in range(1, options.days + 1):
        messages.append({"role": "user", "content": f"Read the log of day {day}."})
        # A small model that may answer at once often does: the first step has to call.
        message = ask(tool_choice="required", parallel_tool_calls=False, max_tokens=64)
        for call in message.tool_calls:
            wanted = json.loads(call.function.arguments)
            print(f"{call.function.name}({wanted})")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": read_log(wanted["day"])})
        # The tools stay as they are in every request: they stand at the start of the prompt.
        ask(max_tokens=40)
        answer_calls(messages)
    question = "What is the shard limit? Answer with the number."
    messages.append({"role": "user", "content": question, "step": "answer", "reads": ["limit"]})
    print(ask(max_tokens=30).content)


if __name__ == "__main__":
    main()
