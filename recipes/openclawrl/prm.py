"""The judge (process reward model) of this recipe: one protocol, its backends, and the choice between them.

It knows what a judge is asked and what it answers; how each backend comes to a verdict is in `judge/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from recipes.openclawrl.judge.embedded import EmbeddedPrm
from recipes.openclawrl.judge.endpoint import OpenAIPrm
from reef.errors import ConfigError
from reef.recipe import Verdict

__all__ = ["EmbeddedPrm", "OpenAIPrm", "Prm", "make_prm"]


class Prm(Protocol):
    """Says what the message after a reply tells about it."""

    name: str
    """backend, model and version"""

    async def judge(self, history: Sequence[Mapping[str, str]], next: Mapping[str, str], *, memo: str = "") -> Verdict:
        """Judge the replies in `history` (`role` and `content` each, no system text) by the `next` message.

        Indices in the verdict count the messages of `history`. Raises JudgeError when no valid verdict could
        be had; it is never turned into 0.
        """
        ...

    async def aclose(self) -> None:
        """Release connections, threads and memory."""
        ...


def make_prm(prm: Any, recipe: Any, model_dir: str | Path) -> Prm:
    """The judge that serve.yaml asks for.

    `prm` has `backend`, `url`, `model`, `key` and `template`; `recipe` has the `prm_*` keys of the recipe's Config;
    `model_dir` holds the policy's base model. Raises ConfigError on an unknown backend.
    """
    if prm.backend == "embedded":
        return EmbeddedPrm(model_dir)
    if prm.backend in ("openai", "vllm", "sglang"):
        return OpenAIPrm(
            prm.url or "",
            prm.model or "",
            prm.key,
            backend=prm.backend,
            template=prm.template,
            structured=recipe.prm_structured,
            prompt_tokens=recipe.prm_prompt_tokens,
            m=recipe.prm_m,
            temperature=recipe.prm_temperature,
            max_tokens=recipe.prm_max_tokens,
            timeout_s=recipe.prm_timeout_s,
            concurrency=recipe.prm_concurrency,
            hint_on=recipe.prm_hint_on,
            max_hints=recipe.prm_max_hint_candidates,
            record_file=recipe.prm_record_file,
        )
    raise ConfigError(f"prm.backend is {prm.backend!r}; it must be embedded, openai, vllm or sglang")
