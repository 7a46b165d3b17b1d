"""OpenClaw-RL as a recipe: a PRM judges each turn by what came next; RL plus hindsight distillation.

Binds the method's parts to Reef's contract; the parts themselves are prm.py (judge), sessions.py and
processor.py (samples), teacher.py and objective.py (loss). Heavy imports happen on first use, so that
the learner runs without torch and the trainer without a judge.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from reef.recipe import JudgedTurn, Loss, RecipeTools, Refusal, Rehearsal, Report, Rule, Scorer, Turn, Verdict
from reef.train.sample import Batch, Sample

if TYPE_CHECKING:
    from recipes.openclawrl.hindsight import Hindsight
    from recipes.openclawrl.objective import Objective
    from recipes.openclawrl.processor import Sizes


CALMEST = 0.25
"""what a step is scaled down to where the user accepts everything, or where nothing shows what is wanted"""


class Config(BaseModel):
    """The `recipe` section of serve.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(default=16, ge=1, description="judged turns per step")
    session_ttl_s: float = Field(default=900.0, gt=0, description="a session nobody continues for this long has ended")
    max_staleness: int = Field(
        default=8, ge=0, description="versions a turn may be behind, corrected by the importance weight"
    )
    prm_m: int = Field(default=3, ge=1, description="votes per turn")
    prm_hint_on: Literal["accept", "reject", "both"] = Field(default="both", description="when a hint is asked for")
    prm_temperature: float = Field(default=0.6, ge=0, description="of the votes")
    prm_max_tokens: int = Field(default=8192, ge=16, description="per vote")
    prm_prompt_tokens: int = Field(
        default=6000, ge=500, description="shown of a conversation, estimated; the middle of long messages is left out"
    )
    prm_structured: bool = Field(
        default=True, description="hold votes to a JSON schema where the endpoint can; false: by the prompt alone"
    )
    prm_timeout_s: float = Field(default=120.0, gt=0, description="per vote")
    prm_concurrency: int = Field(default=8, ge=1, description="turns judged at once")
    prm_max_hint_candidates: int = Field(default=3, ge=1, description="hints kept per turn, shortest first")
    prm_record_file: str | None = Field(default=None, description="JSON-lines file that every judgement is appended to")
    memo_tokens: int = Field(
        default=256, ge=0, description="of the user's accumulated rules, which judge and teacher read; 0 keeps none"
    )
    w_rl: float = Field(default=1.0, ge=0, description="weight of the RL term")
    w_opd: float = Field(default=1.0, ge=0, description="weight of the distillation term")
    objective: Literal["reef", "openclaw"] = Field(
        default="reef", description="openclaw is the published objective, exactly"
    )
    advantage: Literal["raw", "baseline"] | None = Field(default=None, description="overrides the preset's advantage")
    distil: Literal["jsd_full", "jsd_tail", "rkl_tail", "openclaw_topk"] | None = Field(
        default=None, description="overrides the preset's distance to the teacher"
    )
    routing: Literal["always", "routed"] | None = Field(default=None, description="overrides the preset's routing")
    beta_kl: float | None = Field(default=None, ge=0, description="overrides the preset's anchor to the base")
    beta_replay: float | None = Field(
        default=None, ge=0, description="overrides the preset's anchor on a generic prompt"
    )
    rehearsals: int | None = Field(
        default=None, ge=0, description="accepted replies a step repeats; overrides the preset's number"
    )
    w_rehearse: float | None = Field(default=None, ge=0, description="overrides the weight of their likelihood")
    hindsight: bool = Field(
        default=True, description="until something is accepted: demonstrations by the base that knows the hint"
    )
    calm: bool = Field(
        default=True,
        description="smaller steps as first replies are accepted (a quarter at least) or with no teacher",
    )
    max_contexts: int = Field(default=3, ge=1, le=3, description="candidate contexts for the teacher")
    demonstrations: int | None = Field(
        default=None, ge=1, description="accepted replies in one context; overrides the preset's number"
    )
    choose_best: bool | None = Field(
        default=None,
        description="of accepted replies whole ones accepted without a correction first, else the newest; "
        "overrides the preset",
    )
    use_hints: bool = Field(default=True, description="false: only accepted replies are shown to the teacher")
    max_turn_tokens: int = Field(default=2048, ge=16, description="longest prompt plus reply that is trained")
    train_truncated: bool = Field(default=False, description="also train replies that their token limit cut off")


class OpenClawRL:
    """The recipe. `tools` may be None where only `loss` is called."""

    name = "openclawrl"
    Config = Config

    def __init__(self, config: Config, tools: RecipeTools | None = None) -> None:
        self.config = config
        self._tools = tools
        self._prm: Any = None
        self._objective: Objective | None = None
        self._hindsight: Hindsight | None = None

    async def judge(self, turn: Turn) -> Verdict | None:
        from recipes.openclawrl.sessions import judged_history

        history = judged_history(turn)
        report = next((r for r in reversed(turn.reports) if r.score is not None or r.feedback), None)
        if report is not None and report.score is not None:
            return verdict_of_report(report, len(history) - 1)
        if report is not None and report.feedback:  # said about this reply: outweighs whatever came next
            following = {"role": "user", "content": report.feedback}
        elif turn.next is not None:
            following = {"role": turn.next.role, "content": turn.next.text}
        else:
            return None
        from recipes.openclawrl.memo import rendered

        verdict = await self._judge_model().judge(history, following, memo=rendered(turn.memo))
        if (hindsight := self._cold_start()) is not None:
            await hindsight.consider(turn, verdict)
        return verdict

    def remember(self, rules: Sequence[Rule], turn: Turn, verdict: Verdict) -> Sequence[Rule]:
        """The memo with the lasting preference that the verdict found, if it found one."""
        from recipes.openclawrl.memo import add

        if not verdict.rule:
            return rules
        assert self._tools is not None, "the memo is counted in the policy's tokens"
        encode = self._tools.tokenizer.encode
        new = Rule(verdict.rule, turn.id, time.time())
        return add(rules, new, tokens=self.config.memo_tokens, count=lambda text: len(encode(text)))

    def sample(self, turn: Turn, verdict: Verdict, past: Sequence[JudgedTurn]) -> Sample | Refusal:
        from recipes.openclawrl.processor import make_sample

        assert self._tools is not None, "sampling needs the policy's tokenizer"
        return make_sample(
            turn,
            verdict,
            past,
            self._tools.tokenizer,
            sizes=self._sizes(),
            use_hints=self.config.use_hints,
            train_truncated=self.config.train_truncated,
            synthetic=hindsight.of(turn.scenario) if (hindsight := self._cold_start()) else (),
        )

    def form(self, samples: Sequence[Sample], carried: Mapping[str, Any]) -> tuple[list[Sample], dict[str, Any]]:
        from dataclasses import replace

        from recipes.openclawrl.advantage import acceptance, batch_advantages

        advantages, state = batch_advantages(
            [s.reward for s in samples], self._advantage_kind(), float(carried.get("baseline", 0.0))
        )
        formed = [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]
        if not self.config.calm:
            return formed, {"baseline": state}
        content = acceptance([s.reward for s in samples if s.opening], float(carried.get("content", 0.0)))
        led = any(s.contexts for s in samples)  # else it only learns what not to say, and Adam's step is as long
        scale = max(CALMEST, 1.0 - content) if led else CALMEST
        return formed, {"baseline": state, "content": content, "lr_scale": scale}

    def rehearse(self, past: Sequence[JudgedTurn], version: int, step: Collection[str]) -> Rehearsal:
        from recipes.openclawrl.processor import rehearsal

        assert self._tools is not None, "rehearsing needs the policy's tokenizer"
        return rehearsal(
            past,
            version,
            self._tools.tokenizer,
            count=self.rehearsals(),
            sizes=self._sizes(),
            train_truncated=self.config.train_truncated,
            step=step,
        )

    def loss(self, batch: Batch, policy: Scorer, reference: Scorer) -> Loss:
        from recipes.openclawrl.teacher import loss

        return loss(batch, policy, reference, self.objective())

    def active(self, sample: Sample) -> bool:
        """Whether the sample has a trained token and a term; `Batch.n_eff` counts these."""
        from recipes.openclawrl.teacher import active

        return active(sample, self.objective())

    def objective(self) -> Objective:
        """The preset with the configured switches laid over it."""
        if self._objective is None:
            from dataclasses import replace

            from recipes.openclawrl.objective import PRESETS

            named = ("advantage", "distil", "routing", "w_rehearse", "beta_kl", "beta_replay")
            chosen = {n: v for n in named if (v := getattr(self.config, n)) is not None}
            preset = PRESETS[self.config.objective]
            self._objective = replace(preset, w_rl=self.config.w_rl, w_opd=self.config.w_opd, **chosen)
        return self._objective

    def rehearsals(self) -> int:
        """How many accepted replies a step repeats."""
        if self.config.rehearsals is not None:
            return self.config.rehearsals
        return 0 if self.config.objective == "openclaw" else 4

    def together(self) -> int:
        """How many accepted replies the teacher is shown at once."""
        return self.config.demonstrations or (1 if self.config.objective == "openclaw" else 3)

    def choose_best(self) -> bool:
        """Whether accepted replies teach by how well they show what is wanted, else the newest do."""
        chosen = self.config.choose_best
        return self.config.objective != "openclaw" if chosen is None else chosen

    def _sizes(self) -> Sizes:
        from recipes.openclawrl.processor import Sizes

        return Sizes(self.config.max_turn_tokens, self.config.max_contexts, self.together(), self.choose_best())

    def _advantage_kind(self) -> str:
        return self.config.advantage or ("raw" if self.config.objective == "openclaw" else "baseline")

    def forget(self, turns: Sequence[str]) -> None:
        """Drop what the recipe keeps of turns whose words were erased."""
        cold = self._cold_start()
        if cold is not None:
            cold.forget(turns)

    def _cold_start(self) -> Hindsight | None:
        """Hindsight demonstrations, where they are switched on and both engine and endpoint are there."""
        tools, config = self._tools, self.config
        if not config.hindsight or tools is None or tools.generate is None or tools.folder is None:
            return None
        if getattr(tools.prm, "backend", None) != "openai":
            return None  # the embedded judge reads reactions; it can't examine a reply nobody reacted to
        if self._hindsight is None:
            from recipes.openclawrl.hindsight import Hindsight, endpoint_meets

            meets = endpoint_meets(tools.prm.url, tools.prm.model, tools.prm.key, config.prm_timeout_s)
            self._hindsight = Hindsight(tools.folder / "hindsight.jsonl", tools.generate, meets)
        return self._hindsight

    def _judge_model(self) -> Any:
        if self._prm is None:
            from recipes.openclawrl.prm import make_prm

            assert self._tools is not None, "judging needs the prm section"
            self._prm = make_prm(self._tools.prm, self.config, self._tools.model_dir)
        return self._prm


def verdict_of_report(report: Report, last: int) -> Verdict:
    """An explicit score as a verdict on the reply at index `last`."""
    score = report.score or 0.0
    value = (score > 0) - (score < 0)
    told = " ".join((report.feedback or "").split())
    return Verdict(
        verdict=value,
        target=last if value else None,
        charges=((last, value),) if value else (),
        hint=told[:400] if value < 0 and len(told) > 10 else None,
        confidence=1.0,
        judge="report",
    )
