"""What harnesses write around, after and instead of the user's words.

`said` takes a user message apart: the user's own words, tool output that a client sends as user text, and
turns the harness wrote. What is only context for one request (clocks, sender blocks, reminders, file
listings) is dropped, since it is gone or changed in the next request. `instruction` names the side call
that a text asks for. Tables of patterns and pure functions; knows no conversation.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Said:
    kind: str
    """user, tool or harness"""
    text: str


_BLOCK_TAG = (
    r"(?:system[-_]reminder|\w+_state|environment_context|environment_details|(?:user_|ide_|editor_|memory[-_]?)?context"
    r"|user_info|user_instructions|ide_\w+|attached_files|open_files|memory|memories|skills_instructions"
    r"|collaboration_mode|permissions instructions|current_(?:date|time)|git_status)"
)
_BLOCKS = re.compile(
    rf"<(?P<tag>{_BLOCK_TAG})\b[^>]*(?:/>|>.*?</(?P=tag)>)"
    r"|<<<BEGIN_\w*CONTEXT>>>.*?<<<END_\w*CONTEXT>>>",
    re.S | re.I,
)
_BEFORE = re.compile(
    r"\A\s*(?:"
    r".*?\[Current message - respond to this\]\s*"
    r"|\[[^\]\n]*\d{1,2}:\d{2}[^\]\n]*\]\s*"  # a clock, or a channel with a clock
    r"|[A-Z][^\n]{0,80}:[^\n]{0,40}\n```json\n.*?\n```\s*"  # a labelled block of metadata
    r"|/ask\s+|New task:\s*"
    r")+",
    re.S,
)
_AFTER = re.compile(
    r"(?:\n\n(?:To suggest changes to a file you MUST|# \*SEARCH/REPLACE block\* Rules:|# File editing rules:)"
    r"|\n\nRuntime: agent=|\n\nReply in [A-Z]\w+\.\s*\Z|\n\[message_id: [^\]\n]*\]\s*\Z).*",
    re.S,
)
_FILES = re.compile(
    r"\A(?:I have \*added these files to the chat\*|Here are summaries of some files present in my git repo"
    r"|I am working with you on code in a git repository|I am not sharing (?:the full contents of )?any files)"
)
_HARNESS = re.compile(
    r"\A(?:\[System: |Continue if you have next steps|\[Request interrupted|What did we do so far\?"
    r"|Based on the above, please provide an answer|Another language model started to solve this problem"
    r"|The conversation history before this point was compacted|This session is being continued from a previous"
    r"|\[(?:CONTEXT|Context|Conversation|Earlier|Previous|Summary)\b[^\]\n]{0,80}(?:COMPACT|compact|summar|conversation)"
    r"|Here is a summary of the conversation to date|The following is a summary of a branch"
    r"|I updated the files\.|I committed the changes|I ran the command"
    r"|The LLM did not conform to the edit format|# Fix any (?:lint )?errors below|Fix any errors below)"
)
_INTERRUPTED = re.compile(r"\A\[Request interrupted by user[^\]]*\]\s*")
_SIGNS = frozenset("[/NCWBATHIF#")
"""first characters of what harnesses write"""
_OBSERVATION = re.compile(r"\AObservation:\s*")
_AFTER_OBSERVATION = re.compile(
    r"\n(?:(?P<error>Error:\n.*?)(?=\nNew task:|\Z)|New task:\s*(?P<task>.*)\Z"
    r"|(?P<harness>Based on the above, please provide an answer.*)\Z)",
    re.S,
)
_CALLS_AS_TEXT = re.compile(r"\A\s*(?:Calling tools|Tool calls?):\s*(\[.*\])\s*\Z", re.S)


def said(text: str) -> list[Said]:
    """The parts of a user message, in order; empty if all of it was context."""
    if _OBSERVATION.match(text):
        return _observation(text)
    words = own_words(text)
    if not words.strip():
        return []
    stopped = _INTERRUPTED.match(words)
    if stopped and stopped.end() < len(words):
        return [Said("harness", stopped[0].strip()), *said(words[stopped.end() :])]
    return [Said("harness" if _HARNESS.match(words) else "user", words)]


def plain_words(text: str) -> str | None:
    """The text itself where nothing in it can be a harness's, as in nearly every message; else None."""
    if "<" in text or "\n\n" in text or "[message_id" in text or "```json" in text[:400]:
        return None
    if text[:1] in _SIGNS and (_HARNESS.match(text) or _BEFORE.match(text) or _FILES.match(text)):
        return None
    if not text or text[0].isspace() or text.startswith("Observation:"):
        return None
    return text


def own_words(text: str) -> str:
    """A user message without the context a harness wraps around it, otherwise as it was written."""
    bare = text
    if "<" in bare:
        bare = _BLOCKS.sub("", bare)
    head = bare[:400]
    if head.lstrip()[:1] in "[/NCS" or "```json" in head:
        bare = _BEFORE.sub("", bare, count=1)
    if "\n\n" in bare or "[message_id" in bare:
        bare = _AFTER.sub("", bare, count=1)
    if _FILES.match(bare):
        return ""
    return bare if len(bare) == len(text) else bare.strip()


def calls_in_text(text: str) -> tuple[tuple[str, str], ...]:
    """Tool calls a client sends back as text: (name, arguments JSON) of each; empty if it has none."""
    found = _CALLS_AS_TEXT.match(text) if text.lstrip()[:4] in ("Call", "Tool") else None
    if not found:
        return ()
    try:
        listed = ast.literal_eval(found[1])
        functions = [call["function"] for call in listed]
        return tuple((str(f["name"]), _arguments(f["arguments"])) for f in functions)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return ()


def _arguments(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _observation(text: str) -> list[Said]:
    body = _OBSERVATION.sub("", text)
    cut = _AFTER_OBSERVATION.search(body)
    parts = [Said("tool", body[: cut.start()] if cut else body)]
    while cut:
        for kind, name in (("harness", "error"), ("user", "task"), ("harness", "harness")):
            if cut[name]:
                parts.append(Said(kind, cut[name].strip()))
        cut = _AFTER_OBSERVATION.search(body, cut.end())
    return parts


@dataclass(frozen=True, slots=True)
class Instruction:
    """A side call that a text asks for."""

    kind: str
    about: bool
    """it speaks of the conversation itself, which a user's own task seldom does"""


_ASKS = {
    "title": r"\btitle generator\b"
    r"|\b(?:generate|create|write|produce|provide|give|suggest|make)\b[^.\n]{0,70}\b(?:title|headline)\b",
    "summary": r"summari[sz]ation (?:agent|assistant)"
    r"|\bsummari[sz]e\b[^.\n]{0,60}\b(?:conversation|chat|session|dialog|history|messages)"
    r"|summari[sz]ing (?:conversations|chats)|context checkpoint|handoff summary|prefix of a turn"
    r"|summary of (?:the|our|this) (?:conversation|chat|session|work)"
    r"|prompt for continuing (?:our|the|this) conversation"
    r"|context extraction|\bextract\b[^.\n]{0,60}\bcontext\b[^.\n]{0,40}\b(?:conversation|history)",
    "memory": r"review the (?:conversation|chat|session) above|memory flush|update the skill library"
    r"|\b(?:store|save|write)\b[^.\n]{0,40}\b(?:durable )?memor(?:y|ies)\b",
    "commit message": r"\bcommit messages?\b",
    "suggestions": r"\b(?:suggest|generate|predict)\b[^.\n]{0,50}"
    r"\b(?:follow[- ]?ups?|next (?:question|message|prompt|input)|repl(?:y|ies))\b|\[suggestion mode",
    "tags": r"\b(?:generate|assign|create)\b[^.\n]{0,50}\b(?:tags|categor)",
    "search query": r"\bgenerat(?:e|ing)\b[^.\n]{0,50}\bsearch quer(?:y|ies)\b",
    "heartbeat": r"\bheartbeat\b",
    "topic": r"\b(?:new|same) (?:conversation )?topic\b[^.\n]{0,60}\b(?:detect|analy|indicat)"
    r"|analy[sz]e if this message indicates",
}
_CLUES = (
    "title", "headline", "summar", "checkpoint", "prefix of a turn", "continuing", "context", "memor", "above",
    "skill library", "commit", "suggest", "follow", "next ", "repl", "tags", "categor", "quer", "heartbeat", "topic",
)  # fmt: skip
"""without one of these no pattern can match: spares nearly every message the patterns"""
_INSTRUCTIONS = [(kind, re.compile(pattern, re.I)) for kind, pattern in _ASKS.items()]
_ABOUT = re.compile(
    r"\b(?:conversations?|chat(?: history)?|exchange|thread|dialog(?:ue)?|transcript|session|user prompt"
    r"|user'?s? (?:first )?message)\b|<conversation>|^# USER|\bcheckpoint\b|skill library|memory flush|heartbeat"
    r"|\[suggestion mode",
    re.I | re.M,
)


LONG = 400
"""characters from which a message that is not continued is taken for a harness's rather than edited by its user"""


def like_an_instruction(text: str) -> bool:
    """Whether a message reads like a harness's: long, or about the conversation itself."""
    return len(text) >= LONG or bool(_ABOUT.search(text)) or instruction(text) is not None


def instruction(text: str) -> Instruction | None:
    """The side call the beginning of a text asks for, if any."""
    head = text[:600]
    lower = head.lower()
    for clue in _CLUES:
        if clue in lower:
            break
    else:
        return None
    for kind, pattern in _INSTRUCTIONS:
        if pattern.search(head):
            return Instruction(kind, bool(_ABOUT.search(head)))
    return None
