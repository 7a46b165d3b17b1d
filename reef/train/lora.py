"""`train.method: lora`: one low-rank adapter on the linear layers, in PEFT's format and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from reef.errors import ModelError
from reef.releases.chain import FILES
from reef.train.policy import Policy, load_base, untouched

CONFIG, WEIGHTS = FILES["lora"]


class LoraPolicy(Policy):
    """A frozen base model with one LoRA adapter, on and off."""

    method: ClassVar[str] = "lora"

    def __init__(self, model: PeftModel, name: str) -> None:
        super().__init__(model, model.get_base_model(), name)

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
    ) -> LoraPolicy:
        """Load a base model folder (or hub name) and wrap every linear layer but the output head.

        `layers` below 1 adapts that share of the layers only, the last ones: nothing has to be
        differentiated below them.

        `dtype` is that of the frozen base; the adapter is always float32. bfloat16 pays only where the
        processor multiplies it natively. Raises ModelError.
        """
        base = load_base(model_dir, dtype, device)
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules="all-linear",
            exclude_modules=untouched(base, layers),
            lora_dropout=0.0,
            bias="none",
        )
        policy = cls(cast(PeftModel, get_peft_model(base, config)).eval(), Path(model_dir).name)
        policy.fresh(seed=0)
        return policy

    def named_parameters(self) -> Mapping[str, Tensor]:
        state = get_peft_model_state_dict(self.model)
        return {name: t.detach() for name, t in state.items()}

    def fresh(self, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for module in self.model.modules():
                if isinstance(module, LoraLayer):
                    module.reset_lora_parameters("default", init_lora_weights=True)

    def base(self) -> AbstractContextManager[None]:
        return self.model.disable_adapter()

    def save_weights(self, folder: Path) -> None:
        save_file(self.tensors(copy=False), folder / WEIGHTS, metadata={"format": "pt"})
        config: dict[str, Any] = self.model.peft_config["default"].to_dict()
        config |= {"base_model_name_or_path": self.name, "inference_mode": True}
        text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
        (folder / CONFIG).write_text(text + "\n")

    def _read(self, folder: Path) -> Mapping[str, Tensor]:
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
        return tensors


def _plain(value: Any) -> Any:
    """What PEFT's configuration holds beyond JSON: sets (whose order varies by run) and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
