"""Clients in Python, unmodified, over real sockets: what they say through Reef is what they say at the
engine, and the first two of three turns come back with the user's reaction bound to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from reef.sessions.fate import Fate
from tests.clients import anthropic_sdk, frameworks, openai_sdk
from tests.clients.story import ARGUMENTS, ASKS, REPLIES, script
from tests.scripted_engine import scripted_app
from tests.sockets import serving
from tests.stack import Stack, stack

Client = Callable[[str], list[str]]
CHAT: tuple[Client, ...] = (
    openai_sdk.chat,
    openai_sdk.chat_stream,
    openai_sdk.chat_tools,
    openai_sdk.chat_stream_tools,
    frameworks.langchain,
    frameworks.langchain_agent,
    frameworks.pydantic_ai_chat,
    frameworks.openai_agents_chat,
)
"""speak what the engine speaks, so they can be asked to talk to it directly"""
TRANSLATED: tuple[Client, ...] = (
    openai_sdk.responses,
    openai_sdk.responses_chained,
    openai_sdk.responses_stream_tools,
    anthropic_sdk.messages,
    anthropic_sdk.messages_tools,
    anthropic_sdk.messages_stream_tools,
    frameworks.langchain_agent_responses,
    frameworks.pydantic_ai_responses,
    frameworks.pydantic_ai_messages,
    frameworks.openai_agents_responses,
)


@dataclass
class Played:
    """A client's three turns through Reef."""

    client: Client
    said: list[str]
    reef: Stack


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    client: Client = request.param
    with stack(tmp_path_factory.mktemp("client")) as reef:
        reef.script.reply = script().reply
        said = client(reef.url)
        reef.observer().step()
        yield Played(client, said, reef)


def name(client: Client) -> str:
    return client.__name__


@pytest.mark.parametrize("played", CHAT, indirect=True, ids=name)
def test_a_chat_client_says_what_it_says_at_the_engine(played: Played) -> None:
    with serving(scripted_app(script())) as engine_url:
        assert played.said == played.client(engine_url)


@pytest.mark.parametrize("played", [*CHAT, *TRANSLATED], indirect=True, ids=name)
def test_a_client_gets_every_reply_whole(played: Played) -> None:
    said = [line for line in played.said if not line.startswith("tool ")]
    assert len(said) == len(REPLIES)
    assert all(got.startswith(reply) for got, reply in zip(said, REPLIES, strict=True))


@pytest.mark.parametrize("played", [*CHAT, *TRANSLATED], indirect=True, ids=name)
def test_a_tool_call_reaches_the_client_and_its_result_the_engine(played: Played) -> None:
    asked = [body for body in played.reef.script.requests if body.get("tools")]
    if not asked:
        pytest.skip("this client offers no tool")
    calls = [m["tool_calls"] for body in asked for m in body["messages"] if m.get("tool_calls")]
    results = [m for body in asked for m in body["messages"] if m["role"] == "tool"]
    assert calls and all(json.loads(c[0]["function"]["arguments"]) == ARGUMENTS for c in calls)
    assert results and all("7 apples are left" in str(m["content"]) for m in results)


@pytest.mark.parametrize("played", [*CHAT, *TRANSLATED], indirect=True, ids=name)
def test_the_first_two_turns_wait_for_the_judge_with_the_users_reaction(played: Played) -> None:
    reef = played.reef
    exchanges = reef.log.tail(0)
    assert reef.views.funnel()["unread"] == 0
    assert all(exchange.sampled is not None for exchange in exchanges)
    fates = reef.fates()
    assert fates == {Fate.QUEUED: len(exchanges) - 1, Fate.OPEN: 1}
    (session,) = reef.views.sessions()
    reactions = [
        bound["next_state"]
        for turn in reef.views.session(session["session"])["turns"]
        for bound in reef.views.turn(turn["id"])["next_states"]
    ]
    assert [r for r in reactions if "apples are left" not in r] == list(ASKS[1:])
