"""The tokenizer of a checkpoint: from its folder, or a GGUF file's metadata; read beside the weights if it can be."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jaxinfer.store import find_model
from jaxinfer.text import (
    Tokenizer,
    TokenizerFiles,
    TokenizerNotFoundError,
    has_passed_checks,
    read_tokenizer_files,
    tokenizer_files_of,
)


def tokenizer_named(model: str | Path, revision: str | None = None) -> Tokenizer | None:
    """The tokenizer of what a user names as a model; raises as `load_model` and `tokenizer_of`."""
    location = find_model(model, revision)
    assert location.path is not None
    return tokenizer_of(location.path)


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, a GGUF file's rebuilt from its metadata; None where there is none.

    Raises ValueError, with the file and the key, for one that is malformed or cannot be rebuilt exactly.
    """
    import checkpoints_convert

    return begin_tokenizer(path, checkpoints_convert.tokenizer_files(path))()


def begin_tokenizer(path: Path, contents: Mapping[str, str] | None) -> Callable[[], Tokenizer | None]:
    """Begins to make the tokenizer of files with these contents or, where they are None, of the checkpoint's
    directory; the function that is returned waits for it. It is made in a thread, for about a second while the weights
    are read, if its files have passed all checks before; other files are read, and refused, at once."""
    files = _tokenizer_files(path, contents)

    def make() -> Tokenizer | None:
        with _naming(path, contents):
            return None if files is None else Tokenizer(files)

    if files is None or not has_passed_checks(files):
        tokenizer = make()
        return lambda: tokenizer
    pool = ThreadPoolExecutor(1, "jaxinfer-tokenizer")
    future = pool.submit(make)
    pool.shutdown(wait=False)
    return future.result


def _tokenizer_files(path: Path, contents: Mapping[str, str] | None) -> TokenizerFiles | None:
    with _naming(path, contents):
        if contents is not None:
            return tokenizer_files_of(contents) if contents else None
        try:
            return read_tokenizer_files(path)
        except TokenizerNotFoundError:
            return None


@contextmanager
def _naming(path: Path, contents: Mapping[str, str] | None) -> Iterator[None]:
    """Within the block, errors name the GGUF file that the tokenizer is part of."""
    try:
        yield
    except ValueError as error:
        if contents is None:
            raise
        from checkpoints_convert import CheckpointError

        raise CheckpointError(path, f"its tokenizer: {error}") from None
