"""Where compiled programs are kept between processes."""

import os
import stat
from pathlib import Path

import jax


def enable() -> Path | None:
    """Turns on JAX's persistent compilation cache and returns its folder, readable by this user only.

    A folder set in JAX's own configuration wins; otherwise `JAXINFER_CACHE_DIR` (empty: no cache) or
    ~/.cache/jaxinfer. Raises PermissionError if others may write there: cached programs are code.
    """
    if (current := folder()) is not None:
        return current
    setting = os.environ.get("JAXINFER_CACHE_DIR")
    if setting == "":
        return None
    root = Path(setting) if setting else Path.home() / ".cache" / "jaxinfer"
    path = root / "xla"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} is writable by others (mode {stat.filemode(mode)}): chmod 700 it or set JAXINFER_CACHE_DIR"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path


def folder() -> Path | None:
    """The folder in use, or None."""
    current = jax.config.values["jax_compilation_cache_dir"]
    return Path(current) if current else None
