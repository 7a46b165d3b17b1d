"""Continuous batching: one thread that lets sequences join and leave the batch at any step.

Each turn of the loop prefills a bounded number of prompt chunks, then decodes one token for every
running sequence, so neither a long prompt nor a full batch starves the other. Invariants: a sequence
keeps the adapter it was submitted with until it ends; an error ends the sequences it concerns and
never the thread. It knows no HTTP; results leave through each sequence's `emit`, on this thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reef.engine.embedded import sampling
from reef.engine.embedded.adapter import Adapter
from reef.engine.embedded.policy import Policy, Row
from reef.engine.embedded.prefix import CHUNK, PrefixCache, chunk_keys
from reef.engine.embedded.sampling import Settings
from reef.engine.embedded.text import Decode, TextStream

_MOST_CHUNKS = 8
"""prompt chunks per turn of the loop at most, one for each waiting sequence: one long prompt hardly
slows those that run, and many new ones soon make a full batch, which decodes faster"""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be generated. Prompt and reply fit the context: `request.py` saw to it."""

    prompt: tuple[int, ...]
    max_tokens: int
    settings: Settings
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """ids that end the answer and are not part of its text"""
    ends: frozenset[int] = frozenset()
    """those of `stop_ids` by which the model itself ends"""


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token and the text that became certain with it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text: str
    finish: str | None
    """stop or length, on the last piece"""
    stop: str | int | None = None
    """the stop string or stop token id that ended the answer; None for the model's own end"""


@dataclass(frozen=True, slots=True)
class Failure:
    """The sequence ended by an error of the engine."""

    message: str


Emit = Callable[[Piece | Failure], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted job, from its queueing to its end."""

    job: Job
    adapter: Adapter | None
    emit: Emit
    text: TextStream
    cancelled: bool = False
    row: Row | None = None
    keys: list[bytes] = field(default_factory=list)
    source: torch.Generator | None = None
    token: int = -1
    """newest token, fed at the next step"""
    count: int = 0

    def cancel(self) -> None:
        """Give up the answer; its place is free at the next step. Safe from any thread."""
        self.cancelled = True


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    waiting: int


class Scheduler:
    """Owns the policy once started. `submit`, `forget` and `load` are safe from any thread."""

    def __init__(self, policy: Policy, decode: Decode, *, max_batch: int, prefix_bytes: int) -> None:
        self._policy = policy
        self._text = decode
        self._max_batch = max_batch
        self._prefix = PrefixCache(prefix_bytes)
        self._inbox: queue.SimpleQueue[Ticket | int | None] = queue.SimpleQueue()
        self._waiting: list[Ticket] = []
        self._prefilling: list[Ticket] = []
        self._running: list[Ticket] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; what is unfinished gets a Failure."""
        self._inbox.put(None)
        self._thread.join(timeout=30)

    def submit(self, job: Job, adapter: Adapter | None, emit: Emit) -> Ticket:
        ticket = Ticket(job, adapter, emit, TextStream(self._text, job.stops))
        self._inbox.put(ticket)
        return ticket

    def forget(self, adapter: Adapter) -> None:
        """Drop cached prefixes of an adapter that is no longer served."""
        self._inbox.put(adapter.uid)

    @property
    def load(self) -> Load:
        return Load(len(self._running) + len(self._prefilling), len(self._waiting) + self._inbox.qsize())

    def _loop(self) -> None:
        while True:
            self._receive()
            if self._stopping:
                break
            self._sweep()
            for ticket in self._prefilling[:_MOST_CHUNKS]:
                self._guard([ticket], self._prefill, ticket)
            if self._running:
                self._guard(list(self._running), self._decode)
        self._fail([*self._running, *self._prefilling, *self._waiting], "the engine is stopping")

    def _receive(self) -> None:
        """Take what was submitted; sleep while there is nothing at all to do."""
        idle = not (self._running or self._prefilling or self._waiting)
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return
            idle = False
            if item is None:
                self._stopping = True
            elif isinstance(item, int):
                self._prefix.forget(item)
            else:
                self._waiting.append(item)

    def _sweep(self) -> None:
        """Remove the cancelled, admit the waiting in order of arrival."""
        self._running = [t for t in self._running if not t.cancelled]
        self._prefilling = [t for t in self._prefilling if not t.cancelled]
        self._waiting = [t for t in self._waiting if not t.cancelled]
        free = self._max_batch - len(self._running) - len(self._prefilling)
        self._prefilling += self._waiting[:free] if free > 0 else []
        self._waiting = self._waiting[max(free, 0) :]

    def _prefill(self, ticket: Ticket) -> None:
        """Compute the next chunk of a prompt; chunks end at multiples of CHUNK, cached or not."""
        prompt = ticket.job.prompt
        row = ticket.row
        if row is None:
            row = ticket.row = self._policy.row(len(prompt) + ticket.job.max_tokens, ticket.adapter)
            ticket.source = sampling.generator(ticket.job.settings.seed)
            ticket.keys = chunk_keys(prompt)
        # asked before every chunk: a neighbour with the same prompt may have computed it just now
        for chunk in self._prefix.find(_uid(ticket), ticket.keys[row.length // CHUNK :]):
            row.kv[:, :, :, row.length : row.length + CHUNK] = chunk
            row.length += CHUNK
        start = row.length
        stop = min(start + CHUNK, len(prompt))
        logits = self._policy.prefill(row, prompt[start:stop], last=stop == len(prompt))
        if start // CHUNK < len(ticket.keys):
            self._prefix.put(_uid(ticket), ticket.keys[start // CHUNK], row.kv[:, :, :, start:stop])
        if logits is not None:
            self._prefilling.remove(ticket)
            self._running.append(ticket)
            self._running.sort(key=_uid)  # rows of one adapter must be neighbours
            self._accept(ticket, logits)

    def _decode(self) -> None:
        tickets = list(self._running)
        logits = self._policy.decode([t.row for t in tickets if t.row], [t.token for t in tickets])
        for ticket, row in zip(tickets, logits, strict=True):
            self._guard([ticket], self._accept, ticket, row)

    def _accept(self, ticket: Ticket, logits: Tensor) -> None:
        """Draw the next token of a sequence and tell its owner."""
        job = ticket.job
        drawn = sampling.draw(logits, job.settings, ticket.source)
        ticket.token = drawn.token
        ticket.count += 1
        finish, text = None, ""
        stop: str | int | None = None
        if drawn.token in job.stop_ids:
            finish = "stop"
            stop = None if drawn.token in job.ends else drawn.token
        else:
            text = ticket.text.push(drawn.token)
            if ticket.text.stopped:
                finish = "stop"
            elif ticket.count == job.max_tokens:
                finish = "length"
        if finish:
            text += ticket.text.finish()
            if ticket.text.stopped:
                finish, stop = "stop", ticket.text.stopped
            self._running.remove(ticket)
            ticket.row = None
        if not ticket.cancelled:
            ticket.emit(Piece(drawn.token, drawn.logprob, drawn.top, text, finish, stop))

    def _guard(self, concerned: Sequence[Ticket], action: Callable[..., None], *args: object) -> None:
        try:
            action(*args)
        except Exception as error:  # any failure ends these sequences only; the thread serves the rest
            self._fail(concerned, f"{type(error).__name__}: {error}")

    def _fail(self, tickets: Sequence[Ticket], message: str) -> None:
        for ticket in tickets:
            ticket.cancelled, ticket.row = True, None
        self._sweep()
        for ticket in tickets:
            with suppress(RuntimeError):  # its event loop is closed: nobody waits for it any more
                ticket.emit(Failure(message))


def _uid(ticket: Ticket) -> int:
    return ticket.adapter.uid if ticket.adapter else 0
