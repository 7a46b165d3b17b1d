"""Requests nobody would write: generated from an OpenAPI document, then bent further.

Schemathesis makes a few cases of each operation, valid and invalid ones; that costs about 0.1 s each, nearly
all of it for drawing values, so each is sent together with cheap mutants of it. Most cases come from the document with
its objects closed: arbitrary JSON in fields that nobody reads is nine tenths of the cost, and the mutants add
such fields anyway. Reproducible from a seed. Knows no server.
"""

from __future__ import annotations

import ast
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

import reef.wire

EVERY_CHECK: Sequence[Any] = list(HealthCheck)
OPEN_SHARE = 10
"""one case in so many has arbitrary JSON in every field that the document does not name"""


@dataclass(frozen=True, slots=True)
class Case:
    """A request, ready to be sent."""

    method: str
    route: str
    """the operation's path, as the document has it"""
    target: str
    """path and query"""
    headers: Mapping[str, str]
    body: bytes
    valid: bool = True
    """made to be a good request; what is bent of it may still be one"""


def generated(document: Mapping[str, Any], count: int, start: int) -> list[Case]:
    """About `count` cases of each operation that takes a body, for valid and invalid ones each, and a tenth
    of that for the others."""
    many = []
    for opened in (False, True):
        api = schemathesis.openapi.from_dict(dict(document) if opened else _closed(document))
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                modes = list(GenerationMode) if "requestBody" in operation else [GenerationMode.POSITIVE]
                wanted = count if "requestBody" in operation else count // 10
                for mode in modes:
                    strategy = api[path][method].as_strategy(generation_mode=mode)
                    drawn = _drawn(strategy, max(1, wanted // OPEN_SHARE if opened else wanted), start)
                    valid = mode is GenerationMode.POSITIVE
                    many += [_whole(case) if valid else replace(case, valid=False) for case in drawn]
    return many


def _drawn(strategy: Any, count: int, start: int) -> list[Case]:
    out: list[Case] = []

    @seed(start)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=EVERY_CHECK,
    )
    @given(case=strategy)
    def draw(case: Any) -> None:
        made = requests.Request(**case.as_transport_kwargs(base_url="http://reef")).prepare()
        body = made.body.encode() if isinstance(made.body, str) else bytes(made.body or b"")  # type: ignore[arg-type]
        headers = {name: str(value) for name, value in made.headers.items() if name.lower() != "content-length"}
        target = str(made.url).removeprefix("http://reef")
        out.append(Case(str(made.method), case.operation.path, target, headers, body))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw()
    return out


def _whole(case: Case) -> Case:
    """With `1.0` written as `1`: to JSON Schema both are integers, to OpenAI's API and to Reef only the latter."""
    if not case.body:
        return case
    return replace(case, body=json.dumps(json.loads(case.body, parse_float=_number)).encode())


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _closed(schema: Any) -> Any:
    if isinstance(schema, dict):
        schema = {name: _closed(child) for name, child in schema.items()}
        if schema.get("type") == "object":
            schema["additionalProperties"] = False
        return schema
    return [_closed(child) for child in schema] if isinstance(schema, list) else schema


def dictionary() -> list[str]:
    """The words that Reef's dialects look for, from their source."""
    words: set[str] = set()
    for file in Path(next(iter(reef.wire.__path__))).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                words.add(node.value)
    return sorted(words)


def _nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


ODD: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**70, 10**400,
    "", " ", "\x00", "\x1a[1]", "a\x00b", "ü€😀", "\ud800", "\udfff x", "0", "null", "x" * 5000, "\r\n\r\ndata: [DONE]",
    "https://example.invalid/x.png", "data:image/png;base64,AA==", [], {}, [[]], [None], [{}], [1, "a"], {"": ""},
    {"a": None}, [{"type": "text"}], [{"type": "text", "text": None}], {"type": "text", "text": "x"},
    _nested(150), _nested(400),
)  # fmt: skip
NOISE = (
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"NaN",
    b"1e999",
    b"{",
    b"]",
    b'"',
    b"\\ud800",
    b"\xef\xbb\xbf",
    b"//",
    b",",
)
HEADERS = (
    ("x-reef-scenario", "default"), ("x-reef-scenario", "../x"), ("x-reef-scenario", "é" * 65), ("x-reef-train", "off"),
    ("x-reef-tag-session", "s"), ("x-reef-tag-session", "x" * 3000), ("x-reef-tag-turn-type", "side"),
    ("x-reef-tag-turn-type", "none"), ("anthropic-version", "2023-06-01"), ("content-type", "text/plain"),
    ("content-encoding", "gzip"), ("authorization", "Bearer é"), ("accept", "text/event-stream"),
)  # fmt: skip


class Mutator:
    """Bends cases at random. `known` are receipts it may name."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._words = dictionary()
        self.known: list[str] = []

    def mutants(self, case: Case, count: int) -> Iterator[Case]:
        """Made when they are asked for, so that they may name what has been answered meanwhile."""
        for _ in range(count if case.valid else count // 3):
            bent = self._bent(case)
            if self._chance.random() < 0.2:
                name, value = self._chance.choice(HEADERS)
                bent = replace(bent, headers={**bent.headers, name: value})
            yield bent

    def _bent(self, case: Case) -> Case:
        if not case.body:
            return self._other_target(case)
        try:
            body = json.loads(case.body)
        except ValueError:
            return replace(case, body=self._noisy(case.body))
        for _ in range(self._chance.choice((1, 1, 1, 2, 3, 6))):
            body = self._changed(body)
        if isinstance(body, dict) and self._chance.random() < 0.3:
            body["stream"] = True
        try:
            text = json.dumps(body).encode()
        except (ValueError, RecursionError):
            return replace(case, body=self._noisy(case.body))
        return replace(case, body=self._noisy(text) if self._chance.random() < 0.06 else text)

    def _other_target(self, case: Case) -> Case:
        """The same route with another id."""
        names = [*self.known[-50:], "0", "-1", "1" * 30, "..", "a/b", "\x00", "é", "x" * 4000, "%", "?", "#", "resp_"]
        head, brace, tail = case.route.partition("{")
        _, _, tail = tail.partition("}")
        target = head + quote(self._chance.choice(names), safe="") + tail if brace else head + "?x=%00&%ff=1"
        return replace(case, target=target)

    def _noisy(self, body: bytes) -> bytes:
        at = self._chance.randrange(len(body) + 1)
        match self._chance.randrange(4):
            case 0:
                return body[:at]
            case 1:
                return body[:at] + self._chance.choice(NOISE) + body[at:]
            case 2:
                return body[:at] + bytes([self._chance.randrange(256)]) + body[at + 1 :]
            case _:
                return body.decode("utf-8", "replace").encode("utf-16")

    def _value(self) -> Any:
        if self._chance.random() < 0.3:
            return self._chance.choice(self._words)
        if self._chance.random() < 0.2:
            made = {name: self._chance.choice(ODD) for name in self._chance.sample(self._words, 2)}
            made = {**made, "type": self._chance.choice(self._words)} if self._chance.random() < 0.7 else made
            return [deepcopy(made)] if self._chance.random() < 0.3 else deepcopy(made)
        if self.known and self._chance.random() < 0.1:
            return "resp_" + self._chance.choice(self.known[-200:])
        return deepcopy(self._chance.choice(ODD))

    def _changed(self, body: Any) -> Any:
        """One change, anywhere in it."""
        places = list(_containers(body))
        if not places or self._chance.random() < 0.02:
            return self._value()
        at = self._chance.choice(places)
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        change = self._chance.randrange(8) if keys else 5
        key: Any = self._chance.choice(keys) if keys else None
        if change == 0:
            del at[key]
        elif change == 1:
            at[key] = self._value()
        elif change == 2:  # the same, as another type
            old = at[key]
            at[key] = [old] if self._chance.random() < 0.5 else {"type": self._chance.choice(self._words), "text": old}
        elif change == 3 and isinstance(at, list):
            at.extend(deepcopy(at[: self._chance.choice((1, 3, 50))]))
        elif change == 4 and isinstance(at, dict):
            at[self._chance.choice(self._words)] = at.pop(key)
        elif isinstance(at, dict):
            at[self._chance.choice(self._words)] = self._value()
        else:
            at.insert(self._chance.randrange(len(at) + 1), self._value())
        return body


def _containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """Every list and object within it."""
    if isinstance(value, dict | list) and depth < 100:
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from _containers(child, depth + 1)
