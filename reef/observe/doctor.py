"""What a person should know of a service and its store: a list of findings, each with what to do about it.

Pure functions of the configuration and of counts; whoever calls reads the store. It changes nothing, and it
names only what the numbers show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reef.config import Config
from reef.sessions.fate import FINISHED, Fate

LOST = 0.2
"""share of the finished turns above which a way of losing them is worth a word"""
_REMEDY = {
    Fate.MISSING_LOGPROBS: "the engine returned no token ids or log-probs, or the messages no longer render to what it"
    " read; use engine.kind vllm, sglang or embedded",
    Fate.UNSUPPORTED_SAMPLING: "clients sample with temperature 0, top_p, top_k or penalties, under which no ratio is"
    " exact; policy.sampling: train imposes policy.temperature and no truncation",
    Fate.TOO_LONG: "raise recipe.max_turn_tokens",
    Fate.TRUNCATED: "replies end at their token limit; let clients ask for more tokens",
    Fate.AMBIGUOUS: "several conversations look alike; have clients send x-reef-tag-session",
    Fate.GATE_REJECTED: "candidates fail the gate; `reef releases` says which check",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know."""

    about: str
    """a section of serve.yaml, or a fate"""
    level: Literal["note", "problem"]
    said: str
    do: str


def findings(
    config: Config, fates: Mapping[str, int], judge_errors: Sequence[str] = (), unsure: int = 0
) -> list[Finding]:
    """Problems first. `fates` counts exchanges by fate, `judge_errors` is why queued turns have no verdict, `unsure`
    how many verdicts charged nobody."""
    found = [*_keys(config), *_judge(config, judge_errors, unsure), *_lost(fates)]
    if config.policy.serve_memo:
        said = "prompts are served with the memo: answers are no measure of what the weights learned"
        found.append(Finding("policy", "note", said, "policy.serve_memo: false serves the weights alone"))
    return sorted(found, key=lambda finding: finding.level != "problem")


def _keys(config: Config) -> list[Finding]:
    """The learner publishes with the first admin key."""
    keys = config.server.keys
    if not keys or not config.train.enabled:
        return []
    admin = next((key for key in keys if key.role == "admin"), None)
    if admin is None:
        said = "no key has the role admin: the learner can't have its releases served"
        return [Finding("server", "problem", said, "give server.keys one with role: admin and no scenario")]
    if admin.scenario is not None:
        said = f"the first admin key may use scenario {admin.scenario} only: releases of others are not served"
        return [Finding("server", "problem", said, "put an admin key without a scenario before it in server.keys")]
    return []


def _judge(config: Config, errors: Sequence[str], unsure: int) -> list[Finding]:
    found = []
    if config.prm.backend == "embedded":
        said = "the embedded judge works offline on this CPU, but it is small and often wrong on subtle reactions"
        if unsure:
            said += f"; it was too unsure of {unsure} to charge a reply"
        do = "an LLM judge is better: prm.backend: openai, prm.url and prm.model of any OpenAI-compatible endpoint"
        found.append(Finding("prm", "note", said, do))
    if errors:
        said = f"{len(errors)} turns wait for a verdict, the last because: {errors[-1]}"
        found.append(Finding("prm", "problem", said, "they are asked again by themselves once the judge answers"))
    return found


def _lost(fates: Mapping[str, int]) -> list[Finding]:
    finished = sum(n for fate, n in fates.items() if Fate(fate) in FINISHED)
    return [
        Finding(fate.value, "problem", f"{fates[fate.value]} of {finished} finished turns end so", do)
        for fate, do in _REMEDY.items()
        if fates.get(fate.value, 0) > LOST * finished
    ]
