"""The embedded pair: a small model that completes Python code, and its draft."""

from pathlib import Path

EMBEDDED = ("demo", "demo-draft")


def embedded_path(name: str) -> Path | None:
    """The folder of an embedded model's checkpoint, or None for any other name."""
    return Path(__file__).parent / name if name in EMBEDDED else None
