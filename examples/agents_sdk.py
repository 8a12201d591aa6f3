"""An agent of the OpenAI Agents SDK on a Tenure server.

pip install openai-agents
tenure serve --model qwen2.5-coder-0.5b --budget 1024
python examples/agents_sdk.py
"""

from __future__ import annotations

import argparse

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def shards_open(day: int) -> str:
    """How many shards were open on a day."""
    return f"day {day}: {40 + day} shards open. " + "All other checks passed. " * 40


def main() -> None:
    """Two turns in one conversation: the second is answered from the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    options = parser.parse_args()
    set_tracing_disabled(True)  # the SDK would send traces to OpenAI
    client = AsyncOpenAI(base_url=options.base_url, api_key=options.api_key)
    agent = Agent(
        name="Watch",
        instructions="You watch a cluster. Use your tool, then answer in one sentence.",
        tools=[shards_open],
        model=OpenAIChatCompletionsModel(model=options.model, openai_client=client),
        # The first step has to call the tool; the SDK leaves the next ones free.
        model_settings=ModelSettings(
            tool_choice="required", max_tokens=80, extra_body={"session_id": "agents-sdk"}
        ),
    )
    memory = SQLiteSession("shards")
    for question in ("How many shards were open on day 3?", "And on day 5?"):
        print(">", question)
        result = Runner.run_sync(agent, question, session=memory, max_turns=4)
        print(result.final_output)
        for response in result.raw_responses:
            usage = response.usage
            print(f"  {usage.input_tokens} tokens in, {usage.input_tokens_details.cached_tokens} cached")


if __name__ == "__main__":
    main()
