"""Putting a turn together from its records, for a recipe to judge and to sample.

Reads both databases, writes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reef.recipe import JudgedTurn, NextState, Turn, Verdict
from reef.store.learn import LearnStore
from reef.store.log import LogReader
from reef.wire.exchange import Message, conversation
from reef.wire.memo import told
from reef.wire.reading import finish_reason_of, messages_of, reply_of


class Turns:
    def __init__(self, log: LogReader, learn: LearnStore) -> None:
        self._log = log
        self._learn = learn

    def build(self, id: str) -> Turn | None:
        """The turn whose reply is exchange `id`; None if its record is gone."""
        exchange = self._log.get(id)
        row = self._learn.turn(id)
        if exchange is None or row is None or not exchange.request:  # gone, or erased since
            return None
        binding = self._learn.binding(id)
        earlier = self._learn.ancestors(id)
        return Turn(
            id=id,
            scenario=exchange.scenario,
            session=row.session,
            messages=told(messages_of(exchange), exchange.memo),
            reply=reply_of(exchange) or Message("assistant", ""),
            next=NextState(binding.role, binding.next_state) if binding else None,
            sampled=exchange.sampled,
            finish_reason=finish_reason_of(exchange),
            tools=bool(exchange.request.get("tools")),
            earlier=tuple(earlier),
            refused=self._refused(earlier),
            reports=self._learn.reports_on(id),
            memo=tuple(rule.text for rule in self._learn.memo.of(exchange.scenario)),
        )

    def judged(self, id: str) -> JudgedTurn | None:
        """The turn with the newest verdict on it."""
        row = self._learn.verdict_on(id)
        turn = self.build(id)
        return JudgedTurn(turn, charge_as_verdict(row)) if row is not None and turn is not None else None

    def _refused(self, earlier: Sequence[str]) -> int:
        """How many of the replies, counted from the newest, were refused one after the other."""
        return next((n for n, id in enumerate(reversed(earlier)) if not self._learn.refused(id)), len(earlier))

    def accepted(self, scenario: str, limit: int = 16) -> list[JudgedTurn]:
        """The scenario's newest accepted turns, oldest first."""
        out = []
        for row in self._learn.accepted(scenario, limit):
            turn = self.build(row.charged)
            if turn is not None:
                out.append(JudgedTurn(turn, charge_as_verdict(row)))
        return out


def charge_as_verdict(row: Any) -> Verdict:
    """A stored verdict as it falls on the turn it charges. Its hint is for what it was said of: a reply that is
    wanted back does not need "go back to the first version"."""
    body = dict(row.body)
    if row.verdict != body["verdict"]:
        body["hint"] = None
    body["charges"] = tuple((int(i), int(v)) for i, v in body.get("charges", ()))
    body["votes"] = tuple(body.get("votes", ()))
    body["verdict"] = row.verdict
    return Verdict(**body)


def charged_turns(turn: Turn, verdict: Verdict) -> list[tuple[str, int]]:
    """(receipt, verdict) for each charge. Replies that were not served here are left out.

    The history's last assistant message is the turn itself; the ones before it are its ancestors,
    nearest last.
    """
    history = conversation([*turn.messages, turn.reply])
    replies = [i for i, message in enumerate(history) if message["role"] == "assistant"]
    ids = [*turn.earlier, turn.id]
    named = dict(zip(reversed(replies), reversed(ids), strict=False))
    return [(named[index], value) for index, value in verdict.charges if index in named]
