"""What the study compares: each arm's recipe and training settings.

Arms c to e minimise the published objective (raw reward, top-4 surrogate, no anchors) with batch, learning
rate and epochs of the laptop, since sixteen turns a step would be three updates in a run. All arms that
distil draw their contexts from the same source: accepted replies first, the user's complaint where there
is none. Knows no run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from recipes.openclawrl.recipe import Config

TAU = 0.7
LAPTOP = Config(batch_size=4, train_truncated=True, max_contexts=1, max_turn_tokens=300)
PUBLISHED = LAPTOP.model_copy(update={"objective": "openclaw"})


@dataclass(frozen=True, slots=True)
class Arm:
    key: str
    title: str
    learns: bool = True
    memory: Literal["", "rules", "example"] = ""
    memory_tokens: int = 256
    judge: Literal["rule", "embedded"] = "rule"
    recipe: Config = LAPTOP
    lr: float = 6e-4
    epochs: int = 3
    rank: int = 16
    alpha: int = 32
    layers: float = 1.0
    """share of the layers that are adapted, the last ones"""
    max_kl: float = 0.1

    @property
    def sessions_matter(self) -> bool:
        """False where nothing carries over from one session to the next: first replies are enough."""
        return self.learns or bool(self.memory)


REEF = Arm("f", "preset reef", recipe=LAPTOP.model_copy(update={"use_hints": False, "w_rl": 0.3}))

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
