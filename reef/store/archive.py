"""The matcher's memory on disk: every exchange that a later request may still go on from.

Owns the tables `match_nodes` and `match_keys` of the learn database. Invariant: written in the transaction
that commits the decisions it belongs to, so that a restarted matcher knows what the stopped one knew. Knows
no rule of matching; everything here can be derived from the log again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, Engine, delete, func, select
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from reef.sessions.index import MOST, Node
from reef.store.schema import match_keys, match_nodes

_CHUNK = 400
"""keys asked for in one statement"""


class MatchArchive:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def load(self, id: str) -> Node | None:
        with self._engine.connect() as c:
            body = c.execute(select(match_nodes.c.body).where(match_nodes.c.id == id)).scalar()
        return Node.from_json(body) if body else None

    def find(self, keys: Sequence[bytes]) -> Sequence[str]:
        """Ids under any of the keys, oldest first; of one key no more than the newest."""
        with self._engine.connect() as c:
            if len(keys) == 1:
                query = select(match_keys.c.id).where(match_keys.c.key == keys[0])
                return list(c.execute(query.order_by(match_keys.c.seq.desc()).limit(MOST)).scalars())[::-1]
            out: list[str] = []
            for at in range(0, len(keys), _CHUNK):
                query = select(match_keys.c.id).where(match_keys.c.key.in_(keys[at : at + _CHUNK]))
                out += c.execute(query.order_by(match_keys.c.seq.desc()).limit(_CHUNK)).scalars()
            return out[::-1]

    def save(self, c: Connection, nodes: Iterable[Node]) -> None:
        """Write new and changed nodes, inside the caller's transaction."""
        kind = pg_insert if c.dialect.name == "postgresql" else sqlite_insert
        rows = [{"id": n.id, "seq": n.seq, "time": n.time, "session": n.session, "body": n.to_json()} for n in nodes]
        if not rows:
            return
        put = kind(match_nodes)
        changed = {name: put.excluded[name] for name in ("session", "body")}
        c.execute(put.on_conflict_do_update(index_elements=["id"], set_=changed), rows)
        keys = [{"key": k, "seq": n.seq, "id": n.id} for n in nodes for k in n.keys]
        if keys:
            c.execute(kind(match_keys).on_conflict_do_nothing(), keys)

    def empty(self) -> bool:
        with self._engine.connect() as c:
            return (
                c.execute(select(func.count()).select_from(select(match_nodes.c.id).limit(1).subquery())).scalar() == 0
            )

    def prune(self, c: Connection, before: float) -> int:
        """Forget nodes older than a time; returns how many."""
        old = select(match_nodes.c.id).where(match_nodes.c.time < before)
        c.execute(delete(match_keys).where(match_keys.c.id.in_(old)))
        return c.execute(delete(match_nodes).where(match_nodes.c.time < before)).rowcount
