"""Checks of the content of files by their first and last bytes: pictures that are none, lines that are no JSON."""

from __future__ import annotations

import json

from unisono.data.shard_writing.source_samples import Part

BEGINNINGS = {
    "jpg": (b"\xff\xd8\xff",),
    "jpeg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG\r\n\x1a\n",),
    "gif": (b"GIF87a", b"GIF89a"),
    "webp": (b"RIFF",),
    "bmp": (b"BM",),
    "tif": (b"II*\0", b"MM\0*"),
    "tiff": (b"II*\0", b"MM\0*"),
}
"""First bytes of files by extension."""

JPEG_END = b"\xff\xd9"
LAST = 1 << 16
"""Bytes at the end of a JPEG among which its end marker is searched; some cameras write more after it."""


def problem_of(part: Part, content: bytes) -> str:
    """Return what is wrong with a part of a sample, in a line that begins with its place; "": nothing is."""
    extension = part.extension.rpartition(".")[2].lower()
    if extension == "jsonl":
        try:
            json.loads(content)
        except (ValueError, RecursionError) as error:
            return f"{part.path}, byte {part.begin:,}: {error}"
        return ""
    if not content:
        return f"{part.path}: it is empty"
    known = BEGINNINGS.get(extension)
    if known is None:
        return ""
    if not content.startswith(known):
        return f"{part.path}: it is no {extension}, since it begins with {content[:12]!r}"
    if extension in ("jpg", "jpeg") and JPEG_END not in content[-LAST:]:
        return f"{part.path}: it is cut off, since it has no end marker of a JPEG"
    return ""
