"""A recipe whose judge is a rule: a reaction that thanks accepts the reply, any other rejects it.

For tests and benchmarks that need every bound turn to be judged and trained, at once and for certain.
"""

from __future__ import annotations

from reef.recipe import Turn, Verdict
from tests.reports_recipe import ReportsOnly


class RuleJudge(ReportsOnly):
    name = "rule"

    async def judge(self, turn: Turn) -> Verdict | None:
        if turn.next is None:
            return await super().judge(turn)
        index = sum(m.role != "system" for m in turn.messages)
        value = 1 if "thanks" in turn.next.text else -1
        return Verdict(value, index, ((index, value),), judge="rule")
