"""The frozen base model and the adapter on its upper layers, read in two passes or in one.

Judging reads in two: the first goes over what went before (request and reply) and leaves keys and values, the
second reads the next message on top of them; so the clauses of a message share what came before it. Training
reads both as one sequence, which is the same since nothing looks ahead, and starts where the lowest adapted layer
does: below it the base is a function of the row alone. Shapes: B rows, C context tokens, S suffix tokens, D width.
It knows no verdict, no corpus and no file but the base model's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as fn

from reef.errors import ModelError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

KeysValues = list[tuple[Tensor, Tensor]]
"""for each layer keys (rotated) and values, [B, kv heads, C, head width]"""
Adapter = dict[str, tuple[Tensor, Tensor]]
"""`layer.projection` to (A [r, in], B [out, r]), B already scaled"""


@dataclass(frozen=True, slots=True)
class Padded:
    """Token ids of unequal length, padded on the right."""

    ids: Tensor
    """[B, S]"""
    lengths: Tensor
    """[B]"""

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Padded:
        width = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)
        return Padded(ids.reshape(len(rows), width), torch.tensor([len(row) for row in rows]))


class Body:
    """The lowest `depth` layers of a Llama-shaped base model (all if None), in float32 on the CPU.

    Raises ModelError when the folder holds no such model.
    """

    def __init__(self, model_dir: str | Path, depth: int | None = None) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            model: Any = AutoModel.from_pretrained(str(model_dir), dtype=torch.float32, local_files_only=True)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"the judge's base model can't be read from {model_dir}: {error}") from error
        config = model.config
        if config.model_type != "llama":
            raise ModelError(f"the embedded judge reads Llama-shaped models, not {config.model_type}")
        model.requires_grad_(False).eval()
        self.name = f"llama-{config.num_hidden_layers}x{config.hidden_size}"
        self.fingerprint = _fingerprint(model)
        self.depth: int = min(depth or config.num_hidden_layers, config.num_hidden_layers)
        self.width: int = config.hidden_size
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_width: int = config.head_dim
        self._eps: float = config.rms_norm_eps
        self._embed, self._rotary = model.embed_tokens, model.rotary_emb
        self._layers = list(model.layers[: self.depth])

    def shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """(out, in) of each projection an adapter may extend in `layer`."""
        parts = (self._layers[layer].self_attn, self._layers[layer].mlp)
        found = ((name, getattr(part, name, None)) for name in PROJECTIONS for part in parts)
        return {name: tuple(linear.weight.shape) for name, linear in found if linear is not None}

    @torch.inference_mode()
    def context(self, rows: Padded, adapter: Adapter) -> KeysValues:
        """First pass: keys and values of the context in every layer."""
        h = self._embed(rows.ids)
        turn = self._turn(torch.arange(rows.ids.shape[1])[None], h)
        kept: KeysValues = []
        for i, layer in enumerate(self._layers[:-1]):
            h, kv = self._block(layer, h, turn, None, None, adapter, f"{i}.")
            kept.append(kv)
        last = self._layers[-1]  # nobody asks for what leaves it
        x = self._rms(h, last.input_layernorm.weight)
        return [*kept, self._keys_values(last.self_attn, x, turn, adapter, f"{self.depth - 1}.")]

    @torch.inference_mode()
    def lower(self, rows: Padded, until: int) -> Tensor:
        """What enters layer `until` of whole sequences, [B, S, D]; right only where no layer below it is adapted."""
        return self.whole(self._embed(rows.ids), {}, range(until))

    def whole(self, h: Tensor, adapter: Adapter, layers: range) -> Tensor:
        """Hidden states [B, S, D] of whole sequences entering `layers` to those leaving them."""
        turn = self._turn(torch.arange(h.shape[1])[None], h)
        for i in layers:
            h, _ = self._block(self._layers[i], h, turn, None, None, adapter, f"{i}.")
        return h

    def suffix(self, rows: Padded, past: KeysValues, past_lengths: Tensor, adapter: Adapter) -> Tensor:
        """Second pass: the last hidden states [B, S, D] of what follows a context.

        `past` holds the context's keys and values, `past_lengths` [B] how many of its C positions are real.
        """
        h = self._embed(rows.ids)
        s, c = h.shape[1], past[0][0].shape[2]
        turn = self._turn(past_lengths[:, None] + torch.arange(s)[None], h)
        seen = (torch.arange(c)[None] < past_lengths[:, None])[:, None, None, :].expand(-1, 1, s, c)
        causal = torch.ones(s, s, dtype=torch.bool).tril().expand(h.shape[0], 1, s, s)
        mask = torch.cat([seen, causal], dim=-1)
        for i, kv in enumerate(past):
            h, _ = self._block(self._layers[i], h, turn, kv, mask, adapter, f"{i}.")
        return h

    def _turn(self, positions: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(h, positions)
        return cos[:, None], sin[:, None]

    def _block(
        self,
        layer: Any,
        h: Tensor,
        turn: tuple[Tensor, Tensor],
        past: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        adapter: Adapter,
        prefix: str,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One layer: hidden states [B, S, D] in and out, and this pass's own keys and values."""

        def project(linear: Any, name: str, x: Tensor) -> Tensor:
            return _project(linear, x, adapter.get(prefix + name))

        b, s, _ = h.shape
        attention, mlp = layer.self_attn, layer.mlp
        x = self._rms(h, layer.input_layernorm.weight)
        q = project(attention.q_proj, "q_proj", x).view(b, s, self._heads, self._head_width).transpose(1, 2)
        q = _rotate(q, turn)
        k, v = own = self._keys_values(attention, x, turn, adapter, prefix)
        if past is not None:
            k, v = torch.cat([past[0].to(k.dtype), k], dim=2), torch.cat([past[1].to(v.dtype), v], dim=2)
        groups = self._heads // self._kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = fn.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        h = h + project(attention.o_proj, "o_proj", mixed.transpose(1, 2).reshape(b, s, -1))
        x = self._rms(h, layer.post_attention_layernorm.weight)
        gated = fn.silu(project(mlp.gate_proj, "gate_proj", x)) * project(mlp.up_proj, "up_proj", x)
        return h + project(mlp.down_proj, "down_proj", gated), own

    def _keys_values(
        self, attention: Any, x: Tensor, turn: tuple[Tensor, Tensor], adapter: Adapter, prefix: str
    ) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of normed hidden states [B, S, D]."""
        k, v = (
            _project(linear, x, adapter.get(prefix + name))
            .view(*x.shape[:2], self._kv_heads, self._head_width)
            .transpose(1, 2)
            for name, linear in (("k_proj", attention.k_proj), ("v_proj", attention.v_proj))
        )
        return _rotate(k, turn), v

    def _rms(self, h: Tensor, weight: Tensor) -> Tensor:
        return fn.rms_norm(h, (self.width,), weight, self._eps)


def _project(linear: Any, x: Tensor, pair: tuple[Tensor, Tensor] | None) -> Tensor:
    """A linear layer and what an adapter adds to it."""
    out = fn.linear(x, linear.weight)
    return out if pair is None else out + fn.linear(fn.linear(x, pair[0]), pair[1])


def _fingerprint(model: Any) -> str:
    """A hash of all layers' norms: tells one base model from another, whatever file it came in."""
    digest = hashlib.sha256()
    for layer in model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            digest.update(norm.weight.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding, halves swapped as in the released checkpoints."""
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * turn[0] + swapped * turn[1]
