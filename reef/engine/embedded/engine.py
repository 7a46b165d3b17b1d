"""A served model: policy, tokenizer, scheduler, and the names adapters are known by.

Invariant: a call runs on the adapter its model name meant when it was submitted, to its end; an
adapter can be loaded and forgotten at any time. It knows no HTTP.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from reef.engine.embedded.adapter import Adapter
from reef.engine.embedded.policy import Policy, load_policy
from reef.engine.embedded.request import Bounds
from reef.engine.embedded.scheduler import Emit, Job, Load, Scheduler, Ticket
from reef.errors import BadRequest, UnknownModel
from reef.model import ModelTokenizer


class Engine:
    """Make with `Engine.load`; `start` before the first submit, `stop` at the end."""

    def __init__(
        self, name: str, policy: Policy, tokenizer: ModelTokenizer, scheduler: Scheduler, max_context: int
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.bounds = Bounds(min(max_context, policy.max_positions), policy.vocab, policy.eos)
        self._policy = policy
        self._scheduler = scheduler
        self._adapters: dict[str, Adapter] = {}
        self._naming = threading.Lock()

    @staticmethod
    def load(
        path: Path,
        *,
        name: str | None = None,
        dtype: str = "auto",
        threads: int = 1,
        max_batch: int = 16,
        max_context: int = 2048,
        prefix_cache_mb: int = 256,
    ) -> Engine:
        """Load a model folder. Raises ModelError."""
        torch.set_num_threads(threads)
        tokenizer = ModelTokenizer(path)
        policy = load_policy(path, dtype)
        scheduler = Scheduler(policy, tokenizer.decode, max_batch=max_batch, prefix_bytes=prefix_cache_mb << 20)
        return Engine(name or path.name, policy, tokenizer, scheduler, max_context)

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        self._scheduler.stop()

    @property
    def load_now(self) -> Load:
        return self._scheduler.load

    def adapters(self) -> list[Adapter]:
        return list(self._adapters.values())

    def submit(self, model: str | None, job: Job, emit: Emit) -> tuple[str, Ticket]:
        """Queue a job; returns the exact name of what will generate it. Raises UnknownModel."""
        if model is None or model == self.name:
            return self.name, self._scheduler.submit(job, None, emit)
        adapter = self._adapters.get(model)
        if adapter is None:
            raise UnknownModel(f"the model {model!r} does not exist", param="model")
        return model, self._scheduler.submit(job, adapter, emit)

    def load_adapter(self, name: str, path: Path) -> None:
        """Read an adapter beside running requests. Raises ModelError, or BadRequest for a name in use."""
        if name == self.name:
            raise BadRequest(f"{name!r} is the base model's name", param="lora_name")
        adapter = self._policy.adapter(name, path)
        with self._naming:
            if name in self._adapters:
                raise BadRequest(f"the lora adapter {name!r} has already been loaded", param="lora_name")
            self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Forget a name at once; requests in flight finish on it. Raises UnknownModel."""
        with self._naming:
            adapter = self._adapters.pop(name, None)
        if adapter is None:
            raise UnknownModel(f"the lora adapter {name!r} is not loaded", param="lora_name")
        self._scheduler.forget(adapter)
