"""The trained policy: a frozen base model with one LoRA adapter, on and off.

Invariant: the base weights never change and only adapter tensors have a gradient; with the adapter
off the model is the base, bit for bit. It knows no loss, no sample and no release chain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from reef.errors import ModelError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


class Policy:
    """A base model with an adapter. Fulfils `reef.recipe.Scorer`, as does its `reference`."""

    def __init__(self, model: PeftModel, name: str) -> None:
        self.model = model
        self.name = name
        self.reference = Reference(self)
        self.device = next(model.parameters()).device
        base: Any = model.get_base_model()
        eos = base.generation_config.eos_token_id
        self.eos: tuple[int, ...] = (eos,) if isinstance(eos, int) else tuple(eos or (0,))

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        rank: int = 16,
        alpha: int = 32,
        layers: float = 1.0,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> Policy:
        """Load a base model folder (or hub name) and wrap every linear layer but the output head.

        `layers` below 1 adapts that share of the layers only, the last ones: nothing has to be
        differentiated below them.

        `dtype` is that of the frozen base; the adapter is always float32. bfloat16 pays only where the
        processor multiplies it natively. Raises ModelError.
        """
        try:
            base = AutoModelForCausalLM.from_pretrained(
                str(model_dir), dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"can't load the model {model_dir}: {error}") from error
        base.to(torch.device(device))  # pyright: ignore[reportArgumentType]
        frozen = range(round(base.config.num_hidden_layers * (1 - layers)))
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules="all-linear",
            exclude_modules=rf".*\.({'|'.join(map(str, frozen))})\..*" if frozen else None,
            lora_dropout=0.0,
            bias="none",
        )
        model = cast(PeftModel, get_peft_model(base, config))
        policy = cls(model.eval(), Path(model_dir).name)
        policy.fresh(seed=0)
        return policy

    # --- weights ---

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The adapter's parameters, in a fixed order."""
        return (p for p in self.model.parameters() if p.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        """The adapter by PEFT name, on the CPU, copied."""
        state = get_peft_model_state_dict(self.model)
        return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in sorted(state.items())}

    def fresh(self, seed: int) -> None:
        """An untrained adapter: the same for the same seed, and without effect on any log-prob."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for module in self.model.modules():
                if isinstance(module, LoraLayer):
                    module.reset_lora_parameters("default", init_lora_weights=True)

    def load_adapter(self, folder: Path) -> None:
        """Take the weights of a PEFT adapter folder. Raises ModelError if it does not fit."""
        try:
            config = json.loads((folder / CONFIG).read_text())
            tensors = load_file(folder / WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"can't read the adapter {folder}: {error}") from error
        ours = cast(LoraConfig, self.model.peft_config["default"])
        if (config.get("r"), config.get("lora_alpha")) != (ours.r, ours.lora_alpha):
            raise ModelError(
                f"adapter {folder} has rank {config.get('r')} and alpha {config.get('lora_alpha')}; "
                f"the policy is set to {ours.r} and {ours.lora_alpha}"
            )
        self.set_tensors(tensors)

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put in adapter weights by PEFT name. Raises ModelError unless exactly all are given."""
        expected = {name: t.shape for name, t in get_peft_model_state_dict(self.model).items()}
        if expected != {name: t.shape for name, t in tensors.items()}:
            raise ModelError(f"adapter tensors do not fit {self.name}: another model or other target layers")
        set_peft_model_state_dict(self.model, dict(tensors))

    def save_adapter(self, folder: Path) -> None:
        """Write the PEFT adapter format: the same bytes for the same weights, no path of this machine."""
        save_file(self.tensors(), folder / WEIGHTS, metadata={"format": "pt"})
        config: dict[str, Any] = self.model.peft_config["default"].to_dict()
        config |= {"base_model_name_or_path": self.name, "inference_mode": True}
        text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
        (folder / CONFIG).write_text(text + "\n")

    # --- scores ---

    def logits(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
        """Logits that predict each response token, float32 [T, V], with gradient to the adapter.

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
    """The frozen base behind a policy's adapter: the same memory, no gradient.

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
        with self.policy.model.disable_adapter():
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


def _plain(value: Any) -> Any:
    """What PEFT's configuration holds beyond JSON: sets (whose order varies by run) and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
