"""A simulated student with a hidden preference; see the README beside this package.

`run_student` and `run_control` talk to any OpenAI-compatible server, `write_report` turns what they
return into report.json, sessions.csv and learning_curve.png. Nothing here imports the service.
"""

from .live import LiveStatus, View
from .problems import Problem, generated, stream
from .report import ServiceNumbers, adapted_at, agreement, report, write_report
from .rule import Check, chance_of_run, check
from .run import Control, Event, Result, run_control, run_student
from .session import Reply, Session, Settings

__all__ = [
    "Check",
    "Control",
    "Event",
    "LiveStatus",
    "Problem",
    "Reply",
    "Result",
    "ServiceNumbers",
    "Session",
    "Settings",
    "View",
    "adapted_at",
    "agreement",
    "chance_of_run",
    "check",
    "generated",
    "report",
    "run_control",
    "run_student",
    "stream",
    "write_report",
]
