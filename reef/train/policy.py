"""The trained policy, whatever part of it is trained: a frozen base model and weights that differ from it.

Invariant: the base weights never change and only the trained ones have a gradient; switched to its base
the model is the base, bit for bit. It knows no loss, no sample and no release chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from reef.errors import ModelError
from reef.releases.chain import method_of


class Policy(ABC):
    """A base model with trained weights. Fulfils `reef.recipe.Scorer`, as does its `reference`."""

    method: ClassVar[str]
    """the `train.method` it implements"""

    def __init__(self, model: Any, base: Any, name: str) -> None:
        self.model = model
        self.name = name
        self.reference = Reference(self)
        self.device: torch.device = next(model.parameters()).device
        eos = base.generation_config.eos_token_id
        self.eos: tuple[int, ...] = (eos,) if isinstance(eos, int) else tuple(eos or (0,))

    # --- weights ---

    @abstractmethod
    def named_parameters(self) -> Mapping[str, Tensor]:
        """What is trained, by the name it is stored under. The tensors themselves, not copies."""

    @abstractmethod
    def fresh(self, seed: int) -> None:
        """Untrained weights: the same for the same seed, and without effect on any log-prob."""

    @abstractmethod
    def base(self) -> AbstractContextManager[None]:
        """Within it the model is the base."""

    @abstractmethod
    def save_weights(self, folder: Path) -> None:
        """Write the trained weights: the same bytes for the same weights, no path of this machine."""

    @abstractmethod
    def _read(self, folder: Path) -> Mapping[str, Tensor]:
        """The weights in a folder of this method. Raises ModelError."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What is trained, in a fixed order."""
        return (p for p in self.model.parameters() if p.requires_grad)

    def tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        """The trained weights by name, on the CPU. Without `copy` they may go on changing with the policy."""
        return {n: t.to("cpu", copy=copy).contiguous() for n, t in sorted(self.named_parameters().items())}

    def load_weights(self, folder: Path) -> None:
        """Take the weights of a release. Raises ModelError if they do not fit or were trained by another method."""
        if (found := method_of(folder)) != self.method:
            raise ModelError(
                f"{folder} was trained with train.method {found}, the trainer is set to {self.method}: "
                f"set train.method: {found}, or start over from the untrained policy (reef rollback 0)"
            )
        self.set_tensors(self._read(folder))

    @torch.no_grad()
    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put in trained weights by name. Raises ModelError unless exactly all are given."""
        own = self.named_parameters()
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in tensors.items()}:
            raise ModelError(f"trained weights do not fit {self.name}: another model or other target layers")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    # --- scores ---

    def logits(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
        """Logits that predict each response token, float32 [T, V], with gradient to what is trained.

        The head runs at the response's positions only. An empty response gives [0, V].
        """
        return self.predict([*prompt_ids, *response_ids[:-1]], len(response_ids))

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        """The most likely reply to each prompt, at most `limit` ids, the end-of-text id included."""
        ends = self.eos
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[ends[0]] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=seen,
            generation_config=GenerationConfig(
                max_new_tokens=limit, do_sample=False, eos_token_id=list(ends), pad_token_id=ends[0]
            ),
        )
        replies = []
        for row in out[:, width:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            replies.append(row[:end])
        return replies

    def predict(self, ids: Sequence[int], count: int, cache: DynamicCache | None = None) -> Tensor:
        """Logits after each of the last `count` of `ids` [count, V]; `cache` holds what comes before."""
        if not ids:
            raise ValueError("a reply needs a prompt before it")
        out = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            cache=cache,
            use_cache=cache is not None,
            logits_to_keep=max(count, 1),
        )
        return out.logits[0, :count].float()


class Reference:
    """The frozen base behind a policy's trained weights: the same memory, no gradient.

    It remembers the keys and values of its last few inputs and computes only what follows the longest
    beginning shared with one of them: within a step the same demonstration precedes many prompts.
    """

    def __init__(self, policy: Policy, remembered: int = 4) -> None:
        self.policy = policy
        self._remembered = remembered
        self._inputs: list[tuple[list[int], DynamicCache]] = []

    def forget(self) -> None:
        """Drop what is remembered. A step that starts so depends on nothing before it, to the last bit."""
        self._inputs.clear()

    @torch.no_grad()
    def logits(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
        """Logits of the base that predict each response token, float32 [T, V]."""
        ids = [*prompt_ids, *response_ids[:-1]]
        cache, start = self._beginning(ids, len(prompt_ids) - 1)
        with self.policy.base():
            logits = self.policy.predict(ids[start:], len(response_ids), cache)
        self._inputs = [*self._inputs, (ids, cache)][-self._remembered :]
        return logits

    def _beginning(self, ids: Sequence[int], limit: int) -> tuple[DynamicCache, int]:
        """A copy of the longest remembered beginning of `ids`, at most `limit` tokens, and its length."""
        shared = [next((i for i, (a, b) in enumerate(zip(ids, old, strict=False)) if a != b), min(len(ids), len(old)))
                  for old, _ in self._inputs]  # fmt: skip
        length = min(max(shared, default=0), limit)
        copy = DynamicCache()
        if length > 0:
            entry = self._inputs.pop(shared.index(max(shared)))
            self._inputs.append(entry)
            for index, layer in enumerate(entry[1].layers):
                known = cast(DynamicLayer, layer)
                if known.keys is not None and known.values is not None:
                    copy.update(known.keys[:, :, :length], known.values[:, :, :length], index)
        return copy, max(length, 0)


def load_base(model_dir: str | Path, dtype: str, device: str) -> Any:
    """A base model folder (or hub name), all of it frozen. Raises ModelError."""
    try:
        base = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"can't load the model {model_dir}: {error}") from error
    base.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    return base.eval().requires_grad_(False)


def untouched(base: Any, share: float) -> str | None:
    """A pattern for the names of modules in the layers below the last `share`; None when all are trained."""
    frozen = range(round(base.config.num_hidden_layers * (1 - share)))
    return rf".*\.({'|'.join(map(str, frozen))})\..*" if frozen else None
