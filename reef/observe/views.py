"""What people and dashboards may read: status, funnel, sessions, turns, releases.

Reads both databases, writes neither. Invariant: the funnel's fates, together with the exchanges the
learner has not read yet, add up to the number of exchanges in the log.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import Connection, Engine, Row, func, select

from reef.errors import NotFound
from reef.sessions.fate import FINISHED, REACHED_JUDGE, Fate
from reef.store.log import LogReader
from reef.store.schema import bindings, exchanges, fates, releases, steps, turns, verdicts
from reef.wire.reading import messages_of, reply_of


class Views:
    def __init__(self, log: Engine, learn: Engine) -> None:
        self._log = log
        self._learn = learn
        self._reader = LogReader(log)

    def funnel(self) -> dict[str, Any]:
        """Counts of fates over all exchanges, and the share of finished turns that were judged."""
        with self._learn.connect() as c:
            rows = c.execute(select(turns.c.fate, func.count()).group_by(turns.c.fate))
            counts = Counter({row[0]: row[1] for row in rows})
        total = self._reader.count()
        finished = sum(n for f, n in counts.items() if Fate(f) in FINISHED)
        queued = counts[Fate.QUEUED.value]
        judged = sum(n for f, n in counts.items() if Fate(f) in REACHED_JUDGE)
        return {
            "exchanges": total,
            "unread": total - counts.total(),
            "fates": {fate.value: counts[fate.value] for fate in Fate if counts[fate.value]},
            "judged": judged,
            "trained": counts[Fate.TRAINED.value],
            "finished": finished + queued + counts[Fate.JUDGED.value],
            "judged_share": judged / max(1, finished + queued + counts[Fate.JUDGED.value]),
        }

    def status(self) -> dict[str, Any]:
        """The state of the loop in a few numbers."""
        funnel = self.funnel()
        with self._learn.connect() as c:
            running = c.execute(select(func.count()).select_from(steps).where(steps.c.status == "running")).scalar_one()
            newest = c.execute(select(releases.c.scenario, func.max(releases.c.version)).group_by(releases.c.scenario))
            versions = {row[0]: row[1] for row in newest}
            unpublished = c.execute(
                select(func.count())
                .select_from(releases)
                .where(releases.c.status == "released", releases.c.published.is_(None))
            ).scalar_one()
            seconds = c.execute(select(func.sum(verdicts.c.seconds))).scalar() or 0.0
        return {
            "exchanges": funnel["exchanges"],
            "unread": funnel["unread"],
            "judged": funnel["judged"],
            "trained": funnel["trained"],
            "queued": funnel["fates"].get(Fate.QUEUED.value, 0),
            "waiting_for_batch": funnel["fates"].get(Fate.JUDGED.value, 0),
            "steps_running": running,
            "releases": versions,
            "unpublished": unpublished,
            "judge_seconds": seconds,
        }

    def sessions(self, limit: int = 200) -> list[dict[str, Any]]:
        """The newest sessions with their turns by fate."""
        with self._learn.connect() as c:
            newest = func.max(turns.c.seq)
            rows = c.execute(
                select(turns.c.session, func.count(), func.min(turns.c.time), func.max(turns.c.time))
                .group_by(turns.c.session)
                .order_by(newest.desc())
                .limit(limit)
            ).all()
            out = []
            for session, count, first, last in rows:
                per = c.execute(
                    select(turns.c.fate, func.count()).where(turns.c.session == session).group_by(turns.c.fate)
                )
                fate_counts = {row[0]: row[1] for row in per}
                out.append({"session": session, "exchanges": count, "first": first, "last": last, "fates": fate_counts})
        return out

    def session(self, id: str) -> dict[str, Any]:
        """One session's exchanges in order. Raises NotFound."""
        with self._learn.connect() as c:
            rows = c.execute(select(turns).where(turns.c.session == id).order_by(turns.c.seq)).all()
        if not rows:
            raise NotFound(f"no session {id}")
        return {"session": id, "turns": [dict(r._mapping) for r in rows]}

    def turn(self, receipt: str) -> dict[str, Any]:
        """Everything known of one exchange: words, tokens, matching, verdicts, fates. Raises NotFound."""
        exchange = self._reader.get(receipt)
        if exchange is None:
            raise NotFound(f"no exchange {receipt}")
        with self._learn.connect() as c:
            row = c.execute(select(turns).where(turns.c.id == receipt)).first()
            history = c.execute(select(fates).where(fates.c.turn == receipt).order_by(fates.c.seq)).all()
            bound = c.execute(select(bindings).where(bindings.c.turn == receipt).order_by(bindings.c.seq)).all()
            said = c.execute(
                select(verdicts)
                .where((verdicts.c.turn == receipt) | (verdicts.c.charged == receipt))
                .order_by(verdicts.c.seq)
            ).all()
        reply = reply_of(exchange)
        sampled = exchange.sampled
        return {
            "receipt": receipt,
            "time": exchange.time,
            "scenario": exchange.scenario,
            "client": exchange.client,
            "status": exchange.status,
            "delivered": exchange.delivered.value,
            "messages": [{"role": m.role, "content": m.content} for m in messages_of(exchange)],
            "reply": reply.content if reply else None,
            "memo": list(exchange.memo),
            "sampled": {
                "prompt_tokens": len(sampled.prompt_ids),
                "tokens": len(sampled.token_ids),
                "mean_logprob": sum(sampled.logprobs) / len(sampled.logprobs),
                "version": sampled.version,
                "tau": sampled.sampling.tau,
            }
            if sampled and sampled.logprobs
            else None,
            "matching": dict(row._mapping) if row else None,
            "next_states": [dict(b._mapping) for b in bound],
            "verdicts": [dict(v._mapping) for v in said],
            "fates": [dict(f._mapping) for f in history],
        }

    def served(self) -> dict[str, int]:
        """The version each scenario is served at; absent means 0."""
        return self._reader.served()

    def verdicts(self) -> dict[str, int]:
        """The newest verdict on each charged turn, by receipt."""
        with self._learn.connect() as c:
            query = select(verdicts.c.charged, verdicts.c.verdict).where(verdicts.c.charged.is_not(None))
            return {row[0]: row[1] for row in c.execute(query.order_by(verdicts.c.seq))}

    def judges(self) -> list[str]:
        """Names of the judges that gave verdicts."""
        with self._learn.connect() as c:
            return sorted(c.execute(select(verdicts.c.judge).distinct()).scalars())

    def judge_errors(self) -> list[str]:
        """Why queued turns have no verdict yet, oldest first."""
        newest = select(func.max(fates.c.seq)).group_by(fates.c.turn)
        told = (fates.c.fate == Fate.QUEUED.value) & (fates.c.rule == "judge_retry")
        with self._learn.connect() as c:
            query = select(fates.c.reason).where(told, fates.c.seq.in_(newest)).order_by(fates.c.seq)
            return list(c.execute(query).scalars())

    def unsure(self) -> int:
        """How many verdicts were too unsure to charge a reply."""
        query = select(verdicts.c.body).where(verdicts.c.charged.is_(None))
        with self._learn.connect() as c:
            return sum(bool(body.get("verdict")) and not body.get("charges") for body in c.execute(query).scalars())

    def busy_seconds(self) -> float:
        """Time during which at least one request was being answered."""
        with self._log.connect() as c:
            spans = c.execute(select(exchanges.c.started, exchanges.c.time).order_by(exchanges.c.started)).all()
        busy, end = 0.0, 0.0
        for started, ended in spans:
            busy += max(0.0, ended - max(started, end))
            end = max(end, ended)
        return busy

    def releases(self) -> list[dict[str, Any]]:
        """Every release, oldest first; `reaction_to_serving_s` is how long the newest and the oldest
        reaction it learned from waited until it served, null while it does not."""
        with self._learn.connect() as c:
            rows = c.execute(select(releases).order_by(releases.c.scenario, releases.c.version)).all()
            return [{**r._mapping, "reaction_to_serving_s": _waited(c, r)} for r in rows]


def _waited(c: Connection, release: Row[Any]) -> list[float] | None:
    if release.published is None:
        return None
    heard = select(func.max(bindings.c.time)).where(bindings.c.turn.in_(release.turns)).group_by(bindings.c.turn)
    times = list(c.execute(heard).scalars())
    return [round(release.published - t, 1) for t in (max(times), min(times))] if times else None
