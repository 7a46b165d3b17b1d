"""What an engine answers to a request Reef has added to: the exact record, and what the client may see.

Invariant: what Reef adds to a request and what the engine answers because of it never reaches the
client; what the client asked for itself does. Reads the engine's two shapes, chat and text
completions, whole or in chunks; knows no other dialect and no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import orjson

from reef.wire.exchange import Sampled, Sampling
from reef.wire.tokenids import NAMED, named_ids, take_prompt_ids
from reef.wire.toplogprobs import read_logprobs, take_logprobs

READ_AT_BYTES = 1 << 17
"""of log-probs; reading them takes about a millisecond"""
_VALUE = itemgetter(1)
_SHOWN = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio")


def inject(
    request: Mapping[str, Any], *, model: str, top_logprobs: int, exact: bool, chat: bool = True
) -> dict[str, Any]:
    """The request as the engine gets it. `exact` asks for token ids (vLLM's field names) and states
    the sampling settings that an engine might otherwise take from the model's own defaults."""
    sent = {**request, "model": model}
    if not exact:
        return sent
    for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if sent.get(name) is None:
            sent[name] = off
    sent["return_token_ids"] = True
    if chat:
        asked = sent.get("top_logprobs") or 0
        sent.update(logprobs=True, top_logprobs=max(top_logprobs, asked), return_tokens_as_token_ids=True)
    elif sent.get("logprobs") is None:
        # a client that asks for log-probs gets the engine's own token texts, which ids would replace
        sent.update(logprobs=top_logprobs, return_tokens_as_token_ids=True)
    return sent


def sampling_of(sent: Mapping[str, Any]) -> Sampling:
    """The sampling settings of a request as sent to the engine."""

    def number(name: str, default: float) -> float:
        value = sent.get(name)
        return default if value is None else float(value)

    biased = (
        "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "structured_outputs", "bad_words", "allowed_token_ids",
        "logits_processors", "use_beam_search", "min_tokens",
    )  # fmt: skip
    guided = any(sent.get(name) not in (None, False, 0, 0.0, {}, []) for name in biased)
    forced = sent.get("tool_choice") not in (None, "none", "auto")
    shaped = sent.get("response_format")
    shaped = isinstance(shaped, dict) and shaped.get("type", "text") != "text"
    return Sampling(
        tau=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        penalties=guided or forced or shaped or number("repetition_penalty", 1.0) != 1.0,
    )


def _text_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A token by its text, as an engine that was not asked for ids names it."""
    if not str(entry.get("token")).startswith(NAMED):
        return dict(entry)
    raw = entry.get("bytes")
    text = bytes(raw).decode("utf-8", "replace") if raw else ""
    return {"token": text, "logprob": entry["logprob"], "bytes": raw}


def _says_something(choice: Mapping[str, Any]) -> bool:
    """Whether a stream chunk's choice is of use to a client that asked for nothing but the answer."""
    if choice.get("finish_reason"):
        return True
    if "delta" not in choice:
        return bool(choice.get("text"))
    delta = choice["delta"]
    return bool(delta) and ("role" in delta or any(map(delta.get, _SHOWN)))


class Answer:
    """Reads one answer. Give `load` the engine's JSON, and what it returns to `whole`, or for each stream
    chunk to `chunk`; these return what is left for the client. Afterwards `sampled()` is the record."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """`request`: the engine's request before Reef added anything."""
        asked = request.get("logprobs")
        self._asked_logprobs = asked is not None and asked is not False  # 0 asks for those of the tokens alone
        self._asked_top = int(request.get("top_logprobs") or 0)
        self._asked_ids = bool(request.get("return_token_ids"))
        self._asked_tokens_as_ids = bool(request.get("return_tokens_as_token_ids"))
        self._model = request.get("model")
        self.forget()

    def forget(self) -> None:
        """Start again: the engine is asked a second time."""
        self.prompt_ids: Sequence[int] = ()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.topk: list[Sequence[Sequence[float]]] = []
        self._unread: list[bytes] = []
        """log-probs of the newest tokens, as the engine wrote them"""
        self._unread_bytes = 0

    def load(self, content: bytes) -> Any:
        """The engine's JSON, less prompt ids and log-probs the client did not ask for, which are kept. Raises
        ValueError."""
        if not self._asked_ids and not self.prompt_ids:
            content, ids = take_prompt_ids(content)
            if ids is not None:
                self.prompt_ids = ids
        if self._asked_logprobs:
            return orjson.loads(content)
        rest, items = take_logprobs(content)
        if items is None:
            return orjson.loads(content)
        try:
            loaded = orjson.loads(rest)
        except ValueError:
            return orjson.loads(content)
        self._unread.append(items)
        self._unread_bytes += len(items)
        return loaded

    def whole(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """A non-streamed answer; returns it as the client may see it."""
        self._read(response)
        self._read_on()
        return self._strip(response)

    def chunk(self, chunk: Mapping[str, Any]) -> dict[str, Any] | None:
        """One stream chunk; returns it as the client may see it, or None when it exists only because
        of what Reef asked for."""
        self._read(chunk)
        return None if self._only_ours(chunk) else self._strip(chunk)

    def sampled(self, version: int, sampling: Sampling) -> Sampled | None:
        """What was sampled; None unless every token has an id and a log-prob."""
        try:
            self._read_on()
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        if not self.token_ids or len(self.token_ids) != len(self.logprobs) or not self.prompt_ids:
            return None
        return Sampled(
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            topk=tuple(self.topk),
            version=version,
            sampling=sampling,
        )

    def _read_on(self) -> None:
        """Read the log-probs that were left for later: many at a time, since that is cheaper."""
        if not self._unread:
            return
        items, self._unread, self._unread_bytes = b",".join(self._unread), [], 0
        read = read_logprobs(items)
        if read is None:
            self._entries(orjson.loads(b"[%b]" % items))
        else:
            self.logprobs += read[0]
            self.topk += read[1]

    def _entries(self, entries: Sequence[Mapping[str, Any]]) -> None:
        tops = [entry.get("top_logprobs") or [] for entry in entries]
        names = [token["token"] for top in tops for token in top]
        values = [token["logprob"] for top in tops for token in top]
        self._tokens([entry["logprob"] for entry in entries], list(map(len, tops)), names, values)

    def _read(self, part: Mapping[str, Any]) -> None:
        if part.get("prompt_token_ids"):
            self.prompt_ids = tuple(part["prompt_token_ids"])
        for choice in part.get("choices") or []:
            if choice.get("prompt_token_ids"):
                self.prompt_ids = tuple(choice["prompt_token_ids"])
            self.token_ids += choice.get("token_ids") or []
            if choice.get("finish_reason") or self._unread_bytes > READ_AT_BYTES:
                self._read_on()
            logprobs = choice.get("logprobs") or {}
            if entries := logprobs.get("content"):
                self._read_on()
                self._entries(entries)
            if sampled := logprobs.get("token_logprobs"):
                self._read_on()
                rows = [row or {} for row in (logprobs.get("top_logprobs") or [])[: len(sampled)]]
                names = [name for row in rows for name in row]
                values = [value for row in rows for value in row.values()]
                self._tokens(sampled, [*map(len, rows), *[0] * (len(sampled) - len(rows))], names, values)

    def _tokens(self, logprobs: list[Any], counts: list[int], names: list[str], values: list[Any]) -> None:
        """Add tokens with their log-probs; `counts` says how many of the names and values are whose
        alternatives. All at once, since an answer has thousands of them."""
        self.logprobs += map(float, logprobs)
        pairs = list(zip(named_ids(names), map(float, values), strict=True))
        at = 0
        for count in counts:
            row = [(id, value) for id, value in pairs[at : at + count] if id is not None]
            row.sort(key=_VALUE, reverse=True)
            self.topk.append(tuple(row))
            at += count

    def _only_ours(self, chunk: Mapping[str, Any]) -> bool:
        choices = chunk.get("choices")
        if not choices or self._asked_ids or self._asked_logprobs or chunk.get("usage"):
            return False
        return "token_ids" in choices[0] and not any(map(_says_something, choices))

    def _strip(self, part: Mapping[str, Any]) -> dict[str, Any]:
        shown = dict(part)
        if not self._asked_ids:
            shown.pop("prompt_token_ids", None)
        if self._model is not None and "model" in shown:
            shown["model"] = self._model
        if "choices" in shown:
            shown["choices"] = list(map(self._strip_choice, part["choices"] or ()))
        return shown

    def _strip_choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        shown = dict(choice)
        if not self._asked_ids:
            shown.pop("token_ids", None)
            shown.pop("prompt_token_ids", None)
        if "logprobs" not in shown:
            return shown
        if not self._asked_logprobs:
            shown["logprobs"] = None
            return shown
        content = (shown["logprobs"] or {}).get("content")
        if content is not None and not self._asked_tokens_as_ids:
            entries = [
                {
                    **_text_entry(e),
                    "top_logprobs": [_text_entry(t) for t in (e.get("top_logprobs") or [])[: self._asked_top]],
                }
                for e in content
            ]
            shown["logprobs"] = {**shown["logprobs"], "content": entries}
        return shown
