"""Pieces become OpenAI JSON: whole answers and stream chunks, for chat and completions.

A `Shape` is made per answer and fed its pieces in order. It knows no model beyond how a token is
spelled, and no transport.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reef.engine.embedded.request import Call
from reef.engine.embedded.scheduler import Piece
from reef.engine.embedded.tools import Said, ToolText

Spell = Callable[[int], tuple[str, list[int]]]
"""token id -> its text and its bytes"""


class Shape:
    """What chat and completions have in common; `kind` is chat or text."""

    def __init__(self, call: Call, model: str, spell: Spell, *, chat: bool) -> None:
        self._call = call
        self._spell = spell
        self._chat = chat
        self._offset = 0
        self._tools = ToolText() if chat and call.tools else None
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": 0}
        if self._tools:
            said = self._tools.push(text, final=True)
            calls = [{name: value for name, value in call.items() if name != "index"} for call in said.calls]
            message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if calls else "")}
            choice["message"] = {**message, "tool_calls": calls} if calls else message
        elif self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice |= self._facts(pieces, pieces[-1])
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._with_prompt(choice)],
            "usage": self.usage(len(pieces)),
            **self._prompt_ids(),
        }

    def first(self) -> dict[str, Any] | None:
        """The chunk that opens a stream, if there is anything to say before the first token."""
        if self._chat:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            return self._chunk([choice]) | self._prompt_ids()
        if self._call.return_token_ids:
            choice = {"index": 0, "text": "", "finish_reason": None, "token_ids": []}
            return self._chunk([self._with_prompt(choice)]) | self._prompt_ids()
        return None

    def next(self, piece: Piece) -> dict[str, Any] | None:
        """One token's chunk; None when it carries nothing."""
        said = self._tools.push(piece.text, final=piece.finish is not None) if self._tools else Said(piece.text)
        told = said or piece.finish or self._call.logprobs or self._call.return_token_ids
        if not told:
            return None
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            delta: dict[str, Any] = {"content": said.content} if said.content or not (piece.finish or said) else {}
            choice["delta"] = {**delta, "tool_calls": said.calls} if said.calls else delta
        else:
            choice["text"] = said.content
        return self._chunk([choice | self._facts([piece], piece)])

    def last(self, tokens: int) -> dict[str, Any]:
        """The usage chunk a client may ask for."""
        return self._chunk([]) | {"usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self._call.job.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _facts(self, pieces: Sequence[Piece], last: Piece) -> dict[str, Any]:
        logprobs = None
        if self._call.logprobs:
            logprobs = self._chat_logprobs(pieces) if self._chat else self._text_logprobs(pieces)
        called = self._tools is not None and self._tools.called and last.finish == "stop"
        facts: dict[str, Any] = {"logprobs": logprobs, "finish_reason": "tool_calls" if called else last.finish}
        if last.finish:
            facts["stop_reason"] = last.stop
        if self._call.return_token_ids:
            facts["token_ids"] = [piece.token for piece in pieces]
        return facts

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._call.job.prompt)} if self._call.return_token_ids else {}

    def _with_prompt(self, choice: dict[str, Any]) -> dict[str, Any]:
        """vLLM puts a completion's prompt ids on the choice; ours carry them in both places."""
        return choice if self._chat else choice | self._prompt_ids()

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._call.tokens_as_ids else self._spell(token)[0]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": logprob, "bytes": self._spell(token)[1]}

    def _chat_logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "content": [
                self._entry(p.token, p.logprob) | {"top_logprobs": [self._entry(i, v) for i, v in p.top]}
                for p in pieces
            ]
        }

    def _text_logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(self._spell(piece.token)[0])
        tops: list[Mapping[str, float]] = [{self._name(i): v for i, v in p.top} for p in pieces]
        return {
            "tokens": [self._name(p.token) for p in pieces],
            "token_logprobs": [p.logprob for p in pieces],
            "top_logprobs": tops if self._call.job.settings.top else None,
            "text_offset": offsets,
        }
