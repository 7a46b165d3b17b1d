"""What a person sees while the student works: sessions, passes, and how far learning has come.

Invariant: it only shows; it changes nothing and its failure to reach the service is shown as "?".
On a terminal it is one live panel, elsewhere one line per finished session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .run import Event
from .session import Session

WINDOW = 10
"""sessions in the rolling rate"""


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """What the service says of itself."""

    judged: int
    trained: int
    version: int
    note: str = ""
    """anything worth a line: a step running, the judge waiting"""


class View:
    """`async with View(36, status) as view: await run_student(..., on_event=view.on_event)`."""

    def __init__(
        self,
        sessions: int,
        status: Callable[[], Awaitable[LiveStatus]] | None = None,
        *,
        control: int = 0,
        console: Console | None = None,
        every_s: float = 2.0,
    ) -> None:
        self._sessions, self._control, self._status, self._every_s = sessions, control, status, every_s
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._ended: dict[int, Session] = {}
        self._running: dict[int, str] = {}
        self._control_passes: list[bool] = []
        self._seen: LiveStatus | None = None
        self._poll: asyncio.Task[None] | None = None

    def on_event(self, event: Event) -> None:
        if event.kind == "started":
            self._running[event.session] = ""
        elif event.kind == "reply" and event.reply is not None:
            self._running[event.session] = self._running.get(event.session, "") + _mark(event.reply.check.passes)
        elif event.kind == "resumed" and event.record is not None:
            self._ended[event.session] = event.record
        elif event.kind == "control" and event.reply is not None:
            self._control_passes.append(event.reply.check.passes)
        elif event.kind == "ended" and event.record is not None:
            self._running.pop(event.session, None)
            self._ended[event.session] = event.record
            if self._live is None:
                self._console.print(self._line(event.record), highlight=False)
        self._refresh()

    async def __aenter__(self) -> View:
        if self._live is not None:
            self._live.start()
        if self._status is not None:
            self._poll = asyncio.create_task(self._watch(self._status))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._poll is not None:
            self._poll.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poll
        if self._live is not None:
            self._refresh()
            self._live.stop()

    async def _watch(self, status: Callable[[], Awaitable[LiveStatus]]) -> None:
        while True:
            try:
                self._seen = await status()
            except Exception:  # whatever the caller's way to the service raises, the run goes on
                self._seen = None
            self._refresh()
            await asyncio.sleep(self._every_s)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)

    def _rate(self) -> str:
        last = [self._ended[k].first_reply_passes for k in sorted(self._ended)][-WINDOW:]
        return f"{sum(last)}/{len(last)}" if last else "-"

    def _service(self) -> str:
        if self._seen is None:
            return "judged ?  trained ?  version ?" if self._status is not None else ""
        return f"judged {self._seen.judged}  trained {self._seen.trained}  version {self._seen.version}"

    def _line(self, s: Session) -> str:
        verdict = "pass" if s.first_reply_passes else "fail"
        turns = f"{s.turns} {'reply' if s.turns == 1 else 'replies'}"
        where = f"session {s.index + 1:>3}/{self._sessions}"
        return f"{where}  first reply {verdict}  {turns:<9}  last {WINDOW}: {self._rate()}  {self._service()}"

    def _panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 3))
        head.add_row(
            f"[b]sessions[/b] {len(self._ended)}/{self._sessions}",
            f"[b]last {WINDOW}[/b] {self._rate()}",
            self._service(),
        )
        marks = Text("first replies  ")
        for k in sorted(self._ended):
            passed = self._ended[k].first_reply_passes
            marks.append(_mark(passed), style="green" if passed else "red")
        parts: list[RenderableType] = [head, marks]
        if self._control:
            parts.append(Text(f"untrained      {sum(self._control_passes)} of {len(self._control_passes)} pass"))
        if self._seen is not None and self._seen.note:
            parts.append(Text(self._seen.note, style="dim"))
        parts += [Text(f"session {k + 1:>3}    {self._running[k]}", style="dim") for k in sorted(self._running)]
        return Group(*parts)


def _mark(passed: bool) -> str:
    return "●" if passed else "·"
