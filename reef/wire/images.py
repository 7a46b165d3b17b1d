"""Finding what a text-only engine can't read, in any dialect's request. Knows field names only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MEDIA = frozenset({"image", "image_url", "input_image", "audio", "input_audio", "video_url", "file", "input_file"})


def first_media(request: Mapping[str, Any]) -> str | None:
    """The path of the first image, sound or file in a request's messages; None if there is text only."""
    for name in ("messages", "input"):
        items = request.get(name)
        if isinstance(items, list):
            for index, item in enumerate(items):
                if isinstance(item, dict):
                    for path in _media(item, f"{name}[{index}]"):
                        return path
    return None


def _media(holder: Mapping[str, Any], at: str) -> Iterator[str]:
    for name in ("content", "output"):
        parts = holder.get(name)
        if isinstance(parts, list):
            for index, part in enumerate(parts):
                if isinstance(part, dict):
                    path = f"{at}.{name}[{index}]"
                    kind = part.get("type")
                    if isinstance(kind, str) and kind in _MEDIA:
                        yield path
                    yield from _media(part, path)
