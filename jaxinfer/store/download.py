"""Files of a repository into the hub's cache: resumed after a kill, checked, several at once.

`huggingface_hub` starts a file again after its process was killed, and compares sizes only. So files are received here,
into the cache's `blobs`, under the locks of `huggingface_hub`; it then links them as it does its own.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from threading import Event, Lock
from typing import Any

from jaxinfer.files import naming, sync
from jaxinfer.progress import Stage
from jaxinfer.store.pulled import HubName, PulledFile, hub_cache

# Other tools take files with this ending for unfinished downloads, and can remove them.
PARTIAL = ".jaxinfer.incomplete"
NUM_WORKERS = 4
_RANGE_BYTES = 2**32  # of one request: the hub gives no more than 50 GB in one
_NUM_RETRIES = 5  # without any new byte


def blobs_of(name: HubName) -> Path:
    return hub_cache() / name.folder / "blobs"


def missing_bytes(name: HubName, files: Sequence[PulledFile]) -> int:
    """Bytes that are still to be received; files without a checksum count whole unless they are linked."""
    blobs, total = blobs_of(name), 0
    for digest, size in {(file.digest or file.name, file.num_bytes) for file in files}:
        blob = blobs / digest
        if not blob.exists():
            partial = blob.with_name(blob.name + PARTIAL)
            total += size - min(partial.stat().st_size if partial.exists() else 0, size)
    return total


class Transfer:
    """The download of files of one commit, in several threads.

    Args:
      on_bytes: called with the bytes that are there. stop: when it is set, the download ends with InterruptedError.
    """

    def __init__(
        self,
        name: HubName,
        commit: str,
        stage: Stage,
        on_bytes: Callable[[int], None] | None = None,
        stop: Event | None = None,
    ):
        self.name, self.commit = name, commit
        self._stage, self._on_bytes = stage, on_bytes
        self._stop = Event() if stop is None else stop
        self._lock = Lock()

    def run(self, files: Sequence[PulledFile], *, trusted: frozenset[str]) -> None:
        """Puts the files into the cache's blobs, and links them in the snapshot of the commit.

        Blobs that are there are compared with their checksums, except those whose hash is in `trusted`. Files of which
        the hub declares no checksum are left to `huggingface_hub`. Several processes may download the same files: each
        file is received once.

        Raises CheckpointError for bytes that do not match, OSError, and the errors of huggingface_hub.
        """
        from huggingface_hub import snapshot_download

        known = {file.digest: file for file in files if file.digest is not None}
        with ThreadPoolExecutor(NUM_WORKERS) as executor:
            jobs = [executor.submit(self._store, file, digest, digest in trusted) for digest, file in known.items()]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                self._stop.set()
                executor.shutdown(cancel_futures=True)
                raise
        # Each matches one name alone.
        patterns = ["".join(f"[{char}]" if char in "*?[" else char for char in file.name) for file in files]
        snapshot_download(self.name.repository, revision=self.commit, allow_patterns=patterns, tqdm_class=_no_bar())

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._stage.update(num_bytes)
            if self._on_bytes is not None:
                self._on_bytes(self._stage.num_done)

    def _store(self, file: PulledFile, digest: str, is_trusted: bool) -> None:
        """One file, under the lock that `huggingface_hub` takes for it."""
        from huggingface_hub.utils import WeakFileLock

        from checkpoints_convert import CheckpointError

        blob = blobs_of(self.name) / digest
        lock = hub_cache() / ".locks" / self.name.folder / f"{digest}.lock"
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                if blob.stat().st_size == file.num_bytes and (is_trusted or _matches(blob, digest)):
                    self._count(file.num_bytes)
                    return
                blob.unlink()
            partial = blob.with_name(blob.name + PARTIAL)
            was_resumed = partial.exists()
            self._receive(file, partial)
            is_sound = _matches(partial, digest)
            if was_resumed and not is_sound:  # the part that was there may be damaged: once more, from the beginning
                self._count(-file.num_bytes)
                partial.unlink()
                self._receive(file, partial)
                is_sound = _matches(partial, digest)
            if not is_sound:
                partial.unlink()
                raise CheckpointError(
                    f"{self.name.repository}/{file.name}",
                    f"what the hub sent does not have the hash {digest} that it declares; nothing of it is kept",
                )
            os.replace(partial, blob)
            sync(blob.parent)

    def _receive(self, file: PulledFile, partial: Path) -> None:
        """Appends to the partial file what it lacks, and waits until that is on the disk."""
        num_left = _NUM_RETRIES
        with partial.open("ab") as target:
            if target.tell() > file.num_bytes:
                target.truncate(0)
                target.seek(0)
            self._count(target.tell())
            while (start := target.tell()) < file.num_bytes:
                try:
                    self._receive_range(file, target, start)
                except Exception as error:
                    if not _is_transient(error) or num_left == 0:
                        raise
                num_left = _NUM_RETRIES if target.tell() > start else num_left - 1
                if num_left < 0:
                    where = f"{self.name.repository}/{file.name}"
                    raise OSError(f"{where}: the hub sends nothing after {start:,} of {file.num_bytes:,} bytes")
                if target.tell() < min(start + _RANGE_BYTES, file.num_bytes):
                    self._stop.wait(0.2 * 2 ** (_NUM_RETRIES - num_left))
            os.fsync(target.fileno())

    def _receive_range(self, file: PulledFile, target: BufferedWriter, start: int) -> None:
        from huggingface_hub import constants, get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(self.name.repository, file.name, revision=self.commit)
        end = min(start + _RANGE_BYTES, file.num_bytes)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout) as response:
            hf_raise_for_status(response)
            if response.status_code == 200 and start:  # it sends the whole file
                target.truncate(0)
                target.seek(0)
                self._count(-start)
                end = file.num_bytes
            left = end - target.tell()
            for chunk in response.iter_bytes():
                if self._stop.is_set():
                    raise InterruptedError("the download was stopped")
                with naming(Path(target.name)):  # of a full disk
                    target.write(chunk[:left])
                    target.flush()  # a kill loses nothing that was received
                self._count(len(chunk[:left]))
                left -= len(chunk)
                if left <= 0:
                    break


def _no_bar() -> Any:
    """A bar of tqdm's that shows nothing: there is a bar of ours."""
    from tqdm import tqdm

    class NoBar(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            options.pop("name", None)
            super().__init__(*arguments, **{**options, "disable": True})

    return NoBar


def _matches(path: Path, digest: str) -> bool:
    from checkpoints_convert.known_hashes import content_hash

    return content_hash(path, is_git=len(digest) == 40) == digest


def _is_transient(error: BaseException) -> bool:
    """Tells if another try may help. By names, as versions of huggingface_hub have other clients."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429, 500, 502, 503, 504)
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def set_reference(name: HubName, commit: str) -> None:
    """Lets a branch or tag in the cache name the commit, for other tools. Raises OSError."""
    if name.is_pinned:
        return
    folder = hub_cache() / name.folder
    path = folder / "refs" / name.revision
    with suppress(OSError):
        if path.read_text() == commit:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".ref.{os.getpid()}.part"  # a file beside it would be taken for a branch
    temporary.write_text(commit)
    os.replace(temporary, path)
