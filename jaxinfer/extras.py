"""How to install what an optional part needs."""

import shlex
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent


def install_hint(extra: str = "", *, folder: Path = _FOLDER) -> str:
    """The command that installs an extra of jaxinfer, "" for jaxinfer alone: from the checkout that this is, or by the
    package's name where there is none.

    Args:
      folder: that has the packages; it is a checkout if it has a pyproject.toml.
    """
    brackets = f"[{extra}]" if extra else ""
    if not (folder / "pyproject.toml").is_file():
        return f"pip install {_quoted('jaxinfer' + brackets)}"
    try:
        is_here = folder == Path.cwd()
    except OSError:  # the working directory was removed
        is_here = False
    return f"pip install -e {_quoted(('.' if is_here else str(folder)) + brackets)}"


def _quoted(text: str) -> str:
    return f"'{text}'" if "[" in text and "'" not in text else shlex.quote(text)
