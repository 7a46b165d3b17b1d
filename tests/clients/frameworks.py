"""Agent frameworks: LangChain, Pydantic AI, the OpenAI Agents SDK. Each plays the story with its own loop."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.clients.story import ASKS, count_apples


def langchain(url: str) -> list[str]:
    """ChatOpenAI, streamed."""
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="k", model="scripted-base", max_retries=0)  # type: ignore[arg-type]
    said: list[str] = []
    history: list[BaseMessage] = []
    for ask in ASKS:
        history.append(HumanMessage(ask))
        said.append("".join(str(chunk.content) for chunk in model.stream(history)))
        history.append(AIMessage(said[-1]))
    return said


def langchain_agent(url: str) -> list[str]:
    """`create_agent` with a tool, over chat completions."""
    return _langchain_agent(url, responses=False)


def langchain_agent_responses(url: str) -> list[str]:
    return _langchain_agent(url, responses=True)


def _langchain_agent(url: str, *, responses: bool) -> list[str]:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="k",  # type: ignore[arg-type]
        model="scripted-base",
        max_retries=0,
        use_responses_api=responses,
    )
    agent: Any = create_agent(model, tools=[count_apples])
    said: list[str] = []
    messages: list[Any] = []
    for ask in ASKS:
        before = len(messages) + 1
        messages = agent.invoke({"messages": [*messages, {"role": "user", "content": ask}]})["messages"]
        for message in messages[before:]:
            said += [f"tool {call['name']} {call['args']}" for call in getattr(message, "tool_calls", [])]
        said.append(str(messages[-1].text))
    return said


def pydantic_ai_chat(url: str) -> list[str]:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return _pydantic_ai(OpenAIChatModel("scripted-base", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k")))


def pydantic_ai_responses(url: str) -> list[str]:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="k")
    return _pydantic_ai(OpenAIResponsesModel("scripted-base", provider=provider))


def pydantic_ai_messages(url: str) -> list[str]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return _pydantic_ai(AnthropicModel("scripted-base", provider=AnthropicProvider(base_url=url, api_key="k")))


def _pydantic_ai(model: Any) -> list[str]:
    """The first turn streamed, the others whole."""
    from pydantic_ai import Agent

    agent = Agent(model, tools=[count_apples])

    async def play() -> list[str]:
        async with agent.run_stream(ASKS[0]) as streamed:
            said = [await streamed.get_output()]
            history = streamed.all_messages()
        for ask in ASKS[1:]:
            result = await agent.run(ask, message_history=history)
            said.append(result.output)
            history = result.all_messages()
        return said

    return asyncio.run(play())


def openai_agents_chat(url: str) -> list[str]:
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    return _openai_agents(OpenAIChatCompletionsModel("scripted-base", openai_client=client))


def openai_agents_responses(url: str) -> list[str]:
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    return _openai_agents(OpenAIResponsesModel("scripted-base", openai_client=client))


def _openai_agents(model: Any) -> list[str]:
    """The first turn streamed, the others whole."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="counter", instructions="Be kind.", model=model, tools=[function_tool(count_apples)])

    async def play() -> list[str]:
        streamed = Runner.run_streamed(agent, ASKS[0])
        async for _ in streamed.stream_events():
            pass
        said = [streamed.final_output]
        items: list[Any] = streamed.to_input_list()
        for ask in ASKS[1:]:
            result = await Runner.run(agent, [*items, {"role": "user", "content": ask}])
            said.append(result.final_output)
            items = result.to_input_list()
        return said

    return asyncio.run(play())
