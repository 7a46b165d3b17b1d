"""What the study compares: each arm's recipe and training settings.

Arms c to e minimise the published objective (raw reward, top-4 surrogate, no anchors) with batch, learning
rate, epochs and layers of the laptop, since sixteen turns a step would be two updates in a run. All arms that
distil draw their contexts from the same source: accepted replies first, the user's complaint where there
is none. Knows no run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from recipes.openclawrl.recipe import Config
from reef.errors import ConfigError

TAU = 0.7
LAPTOP = Config(batch_size=2, train_truncated=True, max_contexts=1, max_turn_tokens=300)
"""two turns a step, of a session's first two or three replies: the later ones are long, and what a step costs
is what a laptop has least of"""
PUBLISHED = LAPTOP.model_copy(update={"objective": "openclaw", "calm": False})


@dataclass(frozen=True, slots=True)
class Arm:
    key: str
    title: str
    learns: bool = True
    memory: Literal["", "rules", "example"] = ""
    memory_tokens: int = 256
    judge: Literal["rule", "embedded"] = "rule"
    recipe: Config = LAPTOP
    lr: float = 1e-3
    epochs: int = 2
    rank: int = 16
    alpha: int = 32
    layers: float = 0.5
    """share of the layers that are adapted, the last ones"""
    max_kl: float = 0.1
    parallel: int = 1
    """sessions side by side: one user has one at a time"""

    @property
    def sessions_matter(self) -> bool:
        """False where nothing carries over from one session to the next: first replies are enough."""
        return self.learns or bool(self.memory)


REEF = Arm(
    "f",
    "preset reef",
    recipe=LAPTOP.model_copy(update={"use_hints": False, "w_rl": 0.3, "beta_kl": 0.0}),
)

ARMS: Mapping[str, Arm] = {
    arm.key: arm
    for arm in (
        Arm("a", "no learning", learns=False),
        Arm("b", "memory file", learns=False, memory="rules"),
        Arm("b2", "memory file with an accepted answer", learns=False, memory="example"),
        Arm("c", "RL only", recipe=PUBLISHED.model_copy(update={"w_opd": 0.0})),
        Arm("d", "OPD only", recipe=PUBLISHED.model_copy(update={"w_rl": 0.0})),
        Arm("e", "preset openclaw", recipe=PUBLISHED),
        REEF,
        replace(REEF, key="g", title="preset reef, embedded judge", judge="embedded"),
    )
}


def changed(arm: Arm, tag: str, settings: Sequence[str]) -> Arm:
    """The arm with `name=value` settings laid over it, a recipe's as `recipe.name=value`; its key gets the
    tag. Raises ConfigError for a name that is none or a value that does not fit."""
    if not settings:
        return arm
    own: dict[str, Any] = {}
    recipe = arm.recipe.model_dump()
    for item in settings:
        name, _, text = item.partition("=")
        where, _, key = name.rpartition(".")
        value = json.loads(text) if text[:1] in "-0123456789tfn" else text
        if where == "recipe":
            recipe[key] = value
        elif not where and name in Arm.__dataclass_fields__:
            own[name] = value
        else:
            raise ConfigError(f"{item}: not a setting of an arm")
    try:
        return replace(arm, key=f"{arm.key}-{tag}", recipe=Config(**recipe), **own)
    except ValueError as error:
        raise ConfigError(f"{', '.join(settings)}: {error}") from None
