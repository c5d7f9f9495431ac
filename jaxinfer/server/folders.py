"""Folders of the server that administrators may name over HTTP: those below roots which the command line gives."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePath

from jaxinfer.server.api_error import refused

_MAX_PATH = 4096  # characters


class Folders:
    """Folders below some roots, and no others.

    Args:
      roots: their paths. option: that of the command line which names them. param: of a body, which names a folder.
      max_mib: MiB that the files of a folder may have together, and the option that says so; None for any number.

    Raises ValueError for a root that is no folder.
    """

    def __init__(self, roots: Sequence[str] | None, option: str, param: str, max_mib: tuple[int, str] | None = None):
        self._option, self._param, self._max_mib = option, param, max_mib
        self._roots = [Path(os.path.realpath(root)) for root in roots or ()]
        for root in self._roots:
            if not root.is_dir():
                raise ValueError(f"{option}: {root} is no folder")

    def folder(self, given: str) -> Path:
        """The real path of a folder, which is given as it is or from a root. Raises APIError 400.

        What lies outside is not looked at: the error is that of a folder that there is not.
        """
        path = PurePath(given)
        if given and len(given) <= _MAX_PATH and "\0" not in given and ".." not in path.parts:
            for place in (path,) if path.is_absolute() else [root / path for root in self._roots]:
                real = Path(os.path.realpath(place))
                if any(root in real.parents for root in self._roots) and os.path.isdir(real):
                    self._check_files(real, given)
                    return real
        raise refused(
            self._param,
            f"{self._param}={given!r:.300} is no folder below {self._option}; links out of it and '..' are not "
            "followed, and nothing is downloaded",
        )

    def _check_files(self, folder: Path, given: str) -> None:
        num_bytes = 0
        entries = (os.path.join(place, name) for place, *names in os.walk(folder) for name in (*names[0], *names[1]))
        for entry in entries:
            real, name = os.path.realpath(entry), os.path.relpath(entry, folder)
            if folder not in Path(real).parents:
                raise refused(self._param, f"{given:.300}/{name:.100} is a link out of its folder")
            about = os.stat(real)
            if stat.S_ISDIR(about.st_mode):
                continue
            if not stat.S_ISREG(about.st_mode):  # opening a pipe would wait for ever
                raise refused(self._param, f"{given:.300}/{name:.100} is no file")
            num_bytes += about.st_size
        if self._max_mib is not None and num_bytes > (limit := self._max_mib[0] << 20):
            told = f"the files of {given:.300} have {num_bytes:,} bytes, {self._max_mib[1]} {self._max_mib[0]} allows"
            raise refused(self._param, f"{told} {limit:,}")
