"""The model's forward pass over rows: a chunk of one prompt, or one token of each running row.

Linear layers see all rows at once; attention sees one row at a time, over that row's own keys and
values. So a row's attention never depends on who shares the batch, rows of any length join and leave
without padding or moving memory, and the same row alone gives the same bits every time.
It knows no requests, no text and no sampling. Not thread-safe: one thread runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from reef.engine.embedded.adapter import Adapter, Route, RoutedLinear, route_linears
from reef.engine.embedded.full import load_full
from reef.engine.embedded.lora import load_lora
from reef.errors import ModelError
from reef.releases.chain import method_of

_ATTENTION = "reef_rows"


@dataclass(slots=True, eq=False)
class Row:
    """One sequence's keys and values. Memory is reserved whole but touched only as it fills."""

    kv: Tensor
    """[layers, 2, kv_heads, capacity, head_dim]"""
    adapter: Adapter | None
    length: int = 0
    """columns filled"""


@dataclass(slots=True)
class Policy:
    """A causal language model on the CPU. Made by `load_policy`."""

    model: Any
    dtype: torch.dtype
    eos: frozenset[int]
    vocab: int
    max_positions: int
    linears: dict[str, RoutedLinear]
    _kv_shape: tuple[int, int, int]
    _route: Route = field(repr=False)

    def adapter(self, name: str, path: Path) -> Adapter:
        """Read a PEFT folder, or one of full weights; safe from any thread. Raises ModelError."""
        load = load_full if method_of(path) == "full" else load_lora
        return load(name, path, self.linears, self.dtype)

    def row(self, capacity: int, adapter: Adapter | None) -> Row:
        layers, heads, dim = self._kv_shape
        return Row(torch.empty(layers, 2, heads, capacity, dim, dtype=self.dtype), adapter)

    @torch.inference_mode()
    def prefill(self, row: Row, ids: Sequence[int], *, last: bool) -> Tensor | None:
        """Append prompt ids to a row; with `last`, float32 logits [V] of what follows them."""
        self._route.spans = [(row.adapter, 0, len(ids))] if row.adapter else []
        positions = torch.arange(row.length, row.length + len(ids)).unsqueeze(0)
        chunk = _Chunk.of(row, len(ids), self.dtype)
        logits: Tensor | None = None
        if last:
            logits = self._forward(self.model, ids, positions, chunk=chunk, logits_to_keep=1).logits[0, 0].float()
        else:
            self._forward(self.model.base_model, ids, positions, chunk=chunk)
        row.length += len(ids)
        return logits

    @torch.inference_mode()
    def decode(self, rows: Sequence[Row], tokens: Sequence[int]) -> Tensor:
        """Append one token to each row; float32 logits [rows, V] of what follows.

        Rows of one adapter must be neighbours.
        """
        self._route.spans = _spans(rows)
        positions = torch.tensor([[row.length for row in rows]])
        logits: Tensor = self._forward(self.model, tokens, positions, step=_Step.of(rows)).logits[0].float()
        for row in rows:
            row.length += 1
        return logits

    def _forward(self, model: Any, ids: Sequence[int], positions: Tensor, **more: Any) -> Any:
        """`more` reaches `_attention` through every layer."""
        return model(input_ids=torch.tensor([list(ids)]), position_ids=positions, use_cache=False, **more)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prefill chunk's place in its row, and who may see whom."""

    row: Row
    size: int
    mask: Tensor
    """additive, [size, row.length + size]"""

    @staticmethod
    def of(row: Row, size: int, dtype: torch.dtype) -> _Chunk:
        mask = torch.full((size, row.length + size), float("-inf"), dtype=dtype).triu_(row.length + 1)
        return _Chunk(row, size, mask)


@dataclass(frozen=True, slots=True)
class _Step:
    """A decode step's views into its rows, [layer][row], made once for all layers."""

    slots: list[tuple[Tensor, ...]]
    """where the new key and value go, [2, kv_heads, head_dim]"""
    keys: list[tuple[Tensor, ...]]
    """all keys with the new one, [1, kv_heads, columns, head_dim]"""
    values: list[tuple[Tensor, ...]]

    @staticmethod
    def of(rows: Sequence[Row]) -> _Step:
        return _Step(
            slots=_by_layer([row.kv[:, :, :, row.length] for row in rows]),
            keys=_by_layer([row.kv[:, 0, None, :, : row.length + 1] for row in rows]),
            values=_by_layer([row.kv[:, 1, None, :, : row.length + 1] for row in rows]),
        )


def _by_layer(views: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(view.unbind(0) for view in views), strict=True))


def _spans(rows: Sequence[Row]) -> list[tuple[Adapter, int, int]]:
    spans, start = [], 0
    for adapter, group in groupby(rows, key=lambda row: row.adapter):
        stop = start + sum(1 for _ in group)
        if adapter is not None:
            spans.append((adapter, start, stop))
        start = stop
    return spans


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    chunk: _Chunk | None = None,
    step: _Step | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: query [1, heads, n, dim] -> [1, n, heads, dim].

    The query heads that share a key head are folded into the query length, so that keys and values
    are read once and never repeated.
    """
    layer = module.layer_idx
    _, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    if chunk is not None:
        start, stop = chunk.row.length, chunk.row.length + count
        keys, values = chunk.row.kv[layer].unbind(0)
        keys[:, start:stop], values[:, start:stop] = key[0], value[0]
        group = heads // kv_heads
        folded = query.view(1, kv_heads, group, count, dim).reshape(1, kv_heads, group * count, dim)
        out = F.scaled_dot_product_attention(
            folded,
            keys[None, :, :stop],
            values[None, :, :stop],
            attn_mask=chunk.mask.repeat(group, 1),
            scale=scaling,
        )
        return out.view(1, heads, count, dim).transpose(1, 2), None
    assert step is not None
    # few, large operations: with many short rows the calls cost as much as the arithmetic
    torch._foreach_copy_(step.slots[layer], torch.stack((key[0], value[0])).unbind(2))  # pyright: ignore[reportPrivateImportUsage]
    queries = query.view(1, kv_heads, heads // kv_heads, count, dim).unbind(3)
    mixed = [
        F.scaled_dot_product_attention(one, keys, values, scale=scaling)
        for one, keys, values in zip(queries, step.keys[layer], step.values[layer], strict=True)
    ]
    return torch.stack(mixed, 1).view(1, count, heads, dim), None


def load_policy(path: Path, dtype: str = "auto") -> Policy:
    """Load a Hugging Face folder for inference. `dtype`: auto, float32 or bfloat16.

    `auto` is bfloat16 where the processor multiplies it (AVX512-BF16, AMX), else float32.
    Raises ModelError when the folder is broken or the architecture can't be run row by row.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    if dtype == "auto":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        dtype = "bfloat16" if fast else "float32"
    torch_dtype: torch.dtype = getattr(torch, dtype)
    AttentionInterface.register(_ATTENTION, _attention)
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, attn_implementation=_ATTENTION)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the model in {path} can't be loaded: {error}") from error
    model.eval().requires_grad_(False)
    config = model.config
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise ModelError(f"{path}: {config.model_type} has layers without full attention; serve it with vLLM")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
    route = Route()
    return Policy(
        model=model,
        dtype=torch_dtype,
        eos=frozenset([eos] if isinstance(eos, int) else eos or ()),
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        linears=route_linears(model, route),
        _kv_shape=(config.num_hidden_layers, heads, dim),
        _route=route,
    )
