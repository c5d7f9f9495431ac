"""Two processes that pull, remove, name, list and read at once: what is listed is always whole."""

import hashlib
import os
import shutil
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxinfer.store import list_models
from tests.store.conftest import REPOSITORY, environment
from tests.store.worker import ROOT, Worker

OTHER = "someone/other"
pytestmark = pytest.mark.slow  # two processes start


@pytest.fixture
def commits(hub, files) -> dict[str, dict[str, str]]:
    """Hashes by commit and file: two commits of each of two repositories, which share their weights."""
    wanted = [name for name in files if name.endswith((".json", ".safetensors"))]
    found = {}
    for repository in (REPOSITORY, OTHER):
        for license in (b"mine", b"yours"):
            content = {**{name: files[name] for name in wanted}, "LICENSE": license * len(repository)}
            commit = hub.push(repository, content, branch=license.decode())
            found[commit] = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        hub.push(repository, content)
        found[hub.repositories[repository].branches["main"]] = found[commit]
    return found


@pytest.fixture
def workers(hub, tmp_path):
    variables = {**os.environ, **environment(hub, tmp_path), "PYTHONPATH": str(ROOT)}
    workers = [Worker(variables) for _ in range(2)]
    yield workers
    for worker in workers:
        worker.close()


names = st.sampled_from([REPOSITORY, OTHER, f"{REPOSITORY}@mine", f"{OTHER}@yours"])
aliases = st.sampled_from(["one", "two"])
operations = st.one_of(
    st.tuples(st.just("pull"), names),
    st.tuples(st.just("remove"), names | aliases),
    st.tuples(st.just("copy"), names, aliases),
    st.tuples(st.just("list")),
    st.tuples(st.just("read"), names | aliases),
)


def check(hub, commits, workers, tmp_path, pairs) -> Counter[str]:
    """Runs pairs of operations at once from an empty store; returns how many of each ended well."""
    for folder in ("hf", "home"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    done: Counter[str] = Counter()
    for pair in pairs:
        for worker, (call, *arguments) in zip(workers, pair, strict=True):
            worker.begin(call, *arguments, *([commits] if call == "read" else []))
        for worker, operation in zip(workers, pair, strict=True):
            code = worker.answer()
            assert code in (0, 1), operation
            done[operation[0] if code == 0 else f"{operation[0]} refused"] += 1
        for model in list_models():
            if model.commit is not None:
                for name, digest in commits[model.commit].items():
                    assert hashlib.sha256((model.path / name).read_bytes()).hexdigest() == digest, (pair, name)
    return done


def test_two_processes_in_a_few_steps(hub, commits, workers, tmp_path):
    done = check(
        hub,
        commits,
        workers,
        tmp_path,
        [
            (("pull", REPOSITORY), ("pull", f"{REPOSITORY}@mine")),
            (("remove", REPOSITORY), ("pull", REPOSITORY)),
            (("copy", REPOSITORY, "one"), ("remove", REPOSITORY)),
            (("pull", REPOSITORY), ("read", REPOSITORY)),
        ],
    )
    assert done["pull"] == 4


@pytest.mark.timeout(3600)
def test_two_processes_in_5000_operations(hub, commits, workers, tmp_path):
    total: Counter[str] = Counter()

    @settings(
        max_examples=100,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.tuples(operations, operations), min_size=25, max_size=25))
    def run(pairs):
        total.update(check(hub, commits, workers, tmp_path, pairs))

    run()
    print(f"{total.total()} operations: {dict(total)}")
    assert total.total() >= 5000
    assert total["list refused"] == 0
