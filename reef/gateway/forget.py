"""`DELETE /reef/sessions/{id}`: words and tokens go, and the answer says which releases learned from them.

The gateway empties the log; the learner follows within a moment, and the answer says whether it has.
Knows no route.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sqlalchemy import Engine

from reef.errors import NotFound
from reef.store.columns import key
from reef.store.forget import FORGOTTEN, erase_in_log, learned_from, scrub, turns_of
from reef.store.learn import LearnStore
from reef.store.log import LogReader, LogWriter

WAIT_S = 10.0
"""for the learner to follow"""


async def forget_session(session: str, log: Engine, learn: Engine, writer: LogWriter) -> dict[str, Any]:
    """Forget a session's exchanges. Raises NotFound for one that nobody knows."""
    ids = await asyncio.to_thread(turns_of, learn, key(session))
    if not ids:
        raise NotFound(f"no session {session}")
    learner, reader = LearnStore(learn), LogReader(log)
    unread = await asyncio.to_thread(lambda: reader.count() - learner.cursor("exchanges"))
    seq = await writer.change(lambda c: erase_in_log(c, ids, FORGOTTEN))
    clean = await asyncio.to_thread(scrub, log)
    deadline = time.monotonic() + WAIT_S
    while not (followed := await asyncio.to_thread(learner.cursor, "erasures") >= seq):
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(0.1)
    return {
        "session": session,
        "exchanges": len(ids),
        "erased": {"log": True, "learn": followed, "log_file_clean": clean},
        "not_matched_yet": max(0, unread),  # exchanges of any session; ask again once this is 0
        "releases": await asyncio.to_thread(learned_from, learn, ids),
    }
