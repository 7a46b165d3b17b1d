"""One run: sessions side by side, round after round, with the learner in between.

A round gives every open session one reply from the version being served, hears its user's reaction, and
lets the learner make one step from what waits. The release of a step is served from the round after the
next: while it trains, the users' next replies still come from the version before. Invariant: the state is
written after every round, and a run that was stopped goes on from there to the same end. Knows no figure.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recipes.openclawrl.examples.openclawrl.student.problems import Problem
from recipes.openclawrl.examples.openclawrl.student.session import request_seed
from recipes.openclawrl.examples.openclawrl.trial.arms import TAU, Arm
from recipes.openclawrl.examples.openclawrl.trial.learner import InProcessLearner, Standing
from recipes.openclawrl.examples.openclawrl.trial.persona import Look, Persona
from recipes.openclawrl.examples.openclawrl.trial.sampler import Drawn, Sampler
from recipes.openclawrl.judge.embedded import EmbeddedPrm
from reef.model import ModelTokenizer
from reef.recipe import JudgedTurn, NextState, Turn, Verdict
from reef.wire.exchange import Message, Sampled, Sampling

ALONE = 16
"""sessions side by side where none learns from another"""
PATIENCE = 4
"""replies to a problem before the user gives up"""
HELD_OUT = 24
HELD_OUT_SEED = 700_001
HELD_OUT_TOKENS = 128
"""the rule reads the first `max_tokens` of a held-out reply, the right number may come later"""


@dataclass(slots=True)
class Talk:
    """One session so far."""

    index: int
    problem: Problem
    messages: list[Message]
    turns: list[Turn] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """Everything a run has come to."""

    standing: Standing = field(default_factory=Standing)
    coming: int | None = None
    """the version that is served after the next replies"""
    round: int = 0
    next_session: int = 0
    open: list[Talk] = field(default_factory=list)
    done: list[Talk] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    """whether the judge's verdicts were the rule's"""
    held_out: dict[str, float] | None = None
    generating: float = 0.0
    training: float = 0.0
    judging: float = 0.0


class Run:
    def __init__(
        self,
        arm: Arm,
        persona: Persona,
        seed: int,
        sessions: int,
        folder: Path,
        model: Path,
        *,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.arm, self.persona, self.seed, self.sessions = arm, persona, seed, sessions
        self._folder, self._tell = folder, tell
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "state.pickle"
        self.state: State = pickle.loads(self._file.read_bytes()) if self._file.exists() else State()
        self._tokenizer = ModelTokenizer(model)
        self._sampler = Sampler(model)
        self._learner = InProcessLearner(arm, model, self._tokenizer, folder / "releases", seed) if arm.learns else None
        self._judge = EmbeddedPrm(model) if arm.judge == "embedded" else None
        self.judge_name = arm.judge

    def go(self, trained: int | None = None) -> State:
        """Work to the end of the run, or until so many turns are trained."""
        state = self.state
        while state.next_session < self.sessions or state.open:
            if trained is not None and state.standing.trained >= trained:
                break
            self._round()
            self._save()
            self._forget_old()
        if state.held_out is None:
            state.held_out = self._held_out()
            self._save()
        if self._judge is not None:
            self.judge_name = self._judge.name
        shutil.rmtree(self._folder / "releases", ignore_errors=True)
        return state

    # --- a round ---

    def _round(self) -> None:
        state = self.state
        parallel = self.arm.parallel if self.arm.sessions_matter else ALONE
        while len(state.open) < parallel and state.next_session < self.sessions:
            state.open.append(self._open(state.next_session))
            state.next_session += 1
        began = self._sampler.seconds
        version = state.standing.served
        folder = self._learner.folder(version) if self._learner else None
        prompts = [self._render(talk.messages) for talk in state.open]
        seeds = [request_seed(self.seed, talk.index, len(talk.turns)) for talk in state.open]
        drawn = self._sampler.sample(prompts, seeds, folder, tau=TAU, limit=self.persona.max_tokens)
        state.generating += self._sampler.seconds - began
        if state.coming is not None:
            state.standing.served, state.coming = state.coming, None
        for talk, prompt, reply in zip(list(state.open), prompts, drawn, strict=True):
            self._hear(talk, prompt, reply, version)
        if self._learner is not None:
            before = self._learner.seconds
            state.coming = self._learner.step(state.standing)
            state.training += self._learner.seconds - before
        state.round += 1
        marks = "".join("1" if t.looks[0].passes else "0" for t in sorted(state.done, key=lambda t: t.index))
        self._tell(
            f"round {state.round} v{state.standing.served} sessions {marks}"
            f" gen {state.generating:.0f} s train {state.training:.0f} s"
        )

    def _open(self, index: int) -> Talk:
        problem = self.persona.problem(self.seed, index)
        system = [Message("system", self._memory_file())] if self.arm.memory and self.state.memory else []
        return Talk(index, problem, [*system, Message("user", problem.text)])

    def _hear(self, talk: Talk, prompt: list[int], drawn: Drawn, version: int) -> None:
        """Give the user its reply, and the learner the user's reaction."""
        state, persona = self.state, self.persona
        text = self._tokenizer.decode(drawn.ids)
        look = persona.look(text, talk.problem, drawn.ended)
        degree = len(talk.turns)
        last = degree + 1 == PATIENCE or not self.arm.sessions_matter
        reaction: str | None = None
        if look.passes:
            reaction = persona.thanks(self.seed, talk.index)
        elif not last:
            reaction = persona.complaint(look, degree, self.seed, talk.index, degree)
        turn = Turn(
            id=f"s{talk.index:03d}-{degree}",
            scenario="default",
            session=f"s{talk.index:03d}",
            messages=tuple(talk.messages),
            reply=Message("assistant", text),
            next=NextState("user", reaction) if reaction else None,
            sampled=Sampled(tuple(prompt), drawn.ids, drawn.logprobs, (), version, Sampling(TAU)),
            finish_reason="stop" if drawn.ended else "length",
            earlier=tuple(t.id for t in talk.turns),
            refused=degree,
        )
        talk.turns.append(turn)
        talk.looks.append(look)
        talk.lengths.append(len(drawn.ids))
        talk.versions.append(version)
        talk.replies.append(text)
        if reaction is not None and not look.passes:
            talk.messages = [*talk.messages, turn.reply, Message("user", reaction)]
            state.memory = [m for m in state.memory if m != reaction] + [reaction]
        if reaction is not None and self._learner is not None:
            self._learner.take(state.standing, JudgedTurn(turn, self._verdict(turn, look)))
        if look.passes or last:
            state.open.remove(talk)
            state.done.append(talk)

    def _verdict(self, turn: Turn, look: Look) -> Verdict:
        """The rule's verdict, or the embedded judge's on the user's words."""
        history = [{"role": m.role, "content": m.content} for m in (*turn.messages, turn.reply) if m.role != "system"]
        at = len(history) - 1
        assert turn.next is not None
        if self._judge is None:
            value = 1 if look.passes else -1
            hint = None if look.passes else turn.next.text
            return Verdict(value, at, ((at, value),), hint=hint, confidence=1.0, judge="rule")
        started = time.process_time()
        verdict = asyncio.run(self._judge.judge(history, {"role": "user", "content": turn.next.text}))
        self.state.judging += time.process_time() - started
        self.state.agreed.append(verdict.verdict == (1 if look.passes else -1))
        return verdict

    # --- what is shown to the model ---

    def _render(self, messages: list[Message]) -> list[int]:
        return self._tokenizer.render([{"role": m.role, "content": m.content} for m in messages])

    def _memory_file(self) -> str:
        """What was said so far, newest last, as a Markdown file of at most `memory_tokens`."""
        lines = ["# What I know about this user", "", "The user said about earlier answers:"]
        kept: list[str] = []
        for said in reversed(self.state.memory):
            candidate = [f"- {said}", *kept]
            if len(self._tokenizer.encode("\n".join([*lines, *candidate]))) > self.arm.memory_tokens:
                break
            kept = candidate
        text = "\n".join([*lines, *kept])
        if self.arm.memory == "example":
            for talk in reversed(self.state.done):
                if talk.looks[-1].passes:
                    text += f'\n\nAn answer the user liked, to "{talk.problem.text}":\n\n{talk.replies[-1]}'
                    break
        return text

    # --- the end ---

    def _held_out(self) -> dict[str, float]:
        """First replies to problems of another seed, under the last version."""
        state, persona = self.state, self.persona
        version = state.coming or state.standing.served
        folder = self._learner.folder(version) if self._learner else None
        talks = [self._open_held_out(k) for k in range(HELD_OUT)]
        drawn = self._sampler.sample(
            [self._render(t.messages) for t in talks],
            [request_seed(HELD_OUT_SEED, self.seed, t.index) for t in talks],
            folder,
            tau=TAU,
            limit=max(HELD_OUT_TOKENS, persona.max_tokens),
        )
        passes, correct, lengths = 0, 0, 0
        for talk, reply in zip(talks, drawn, strict=True):
            short = reply.ids[: persona.max_tokens]
            ended = reply.ended and len(reply.ids) <= persona.max_tokens
            passes += persona.look(self._tokenizer.decode(short), talk.problem, ended).passes
            correct += persona.look(self._tokenizer.decode(reply.ids), talk.problem, reply.ended).correct
            lengths += len(reply.ids)
        return {"n": HELD_OUT, "passes": passes, "correct": correct, "length": lengths / HELD_OUT}

    def _open_held_out(self, k: int) -> Talk:
        index = self.seed * HELD_OUT + k
        problem = self.persona.problem(HELD_OUT_SEED, index)
        system = [Message("system", self._memory_file())] if self.arm.memory and self.state.memory else []
        return Talk(index, problem, [*system, Message("user", problem.text)])

    # --- durability ---

    def _forget_old(self) -> None:
        """Drop releases nobody goes back to: a run keeps the last few, and those its saved state names."""
        if self._learner is None:
            return
        for version in range(1, self.state.standing.newest - 2):
            if version not in (self.state.standing.served, self.state.coming):
                folder = self._learner.folder(version)
                if folder is not None and folder.exists():
                    shutil.rmtree(folder)

    def _save(self) -> None:
        scratch = self._file.with_suffix(".tmp")
        scratch.write_bytes(pickle.dumps(self.state))
        os.replace(scratch, self._file)
