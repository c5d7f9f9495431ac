"""Programs that are kept: traced once, and never taken where anything that they depend on is another."""

import logging
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import kernels
from jaxinfer.engine import compiling, kept_programs
from jaxinfer.kept_files import KeptFiles

TRACES = []


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    total: jax.Array
    other: jax.Array | None = None


@dataclass(frozen=True)
class Static:
    factor: int
    name: str = "one"


def accumulate(static, state, x):
    TRACES.append(static)
    return State(state.total + static.factor * x, state.other), x.sum()


def new_program(function=accumulate):
    """As in a new process: nothing is compiled yet."""
    outputs = lambda static, state, x: (state, 0)  # noqa: E731
    return compiling.LargeProgram(function, outputs=outputs, static_argnums=0, donate_argnums=1)


@pytest.fixture(autouse=True)
def on(monkeypatch, tmp_path):
    TRACES.clear()
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept_programs, "is_on", True)
    monkeypatch.setattr(kept_programs, "_fits_device", lambda: True)
    kept_programs._surroundings.cache_clear()
    yield
    kept_programs._surroundings.cache_clear()


def run(static=Static(2), *, program=None, size=4, other=None):
    """The sum, in a new program: (total, sum of x), and whether it was traced."""
    before = len(TRACES)
    state = State(jnp.zeros(size), other)
    state, total = (program or new_program())(static, state, jnp.arange(float(size)))
    np.testing.assert_array_equal(state.total, static.factor * np.arange(size))
    assert float(total) == np.arange(size).sum()
    return len(TRACES) > before


def entries(tmp_path):
    return sorted((tmp_path / "programs").iterdir())


def test_a_program_is_traced_once(tmp_path):
    assert run()
    assert not run()
    assert len(entries(tmp_path)) == 1


def test_results_are_on_no_device_by_name():
    """As those of a traced program: what takes them, such as sampling, would be compiled twice."""
    arguments = Static(2), State(jnp.zeros(4)), jnp.arange(4.0)
    traced = jax.jit(accumulate, static_argnums=0)(*arguments)
    made, read = (new_program()(Static(2), State(jnp.zeros(4)), jnp.arange(4.0)) for _ in range(2))
    assert len(TRACES) == 2  # without the program and where it was made
    for result in (traced, made, read):
        assert [leaf.committed for leaf in jax.tree.leaves(result)] == [False, False]
    placed = new_program()(Static(2), *jax.device_put((State(jnp.zeros(4)), jnp.arange(4.0)), jax.devices()[0]))
    assert all(leaf.committed for leaf in jax.tree.leaves(placed))


def test_it_stays_off_in_the_suite_and_without_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_programs, "is_on", False)
    assert run()
    monkeypatch.setattr(kept_programs, "is_on", True)
    monkeypatch.setenv("JAXINFER_CACHE_DIR", "")
    assert run()
    assert run()


def test_donated_arguments_are_taken():
    for _ in range(2):
        state = State(jnp.zeros(1000))
        place = state.total.unsafe_buffer_pointer()
        result, _ = new_program()(Static(2), state, jnp.ones(1000))
        assert state.total.is_deleted()
        assert result.total.unsafe_buffer_pointer() == place


def test_lowered_programs_are_kept_too():
    program = new_program()
    program.lower(Static(2), State(jnp.zeros(4)), jnp.arange(4.0)).compile()
    assert not run()


@pytest.mark.parametrize(
    "changed",
    [
        {"static": Static(3)},
        {"static": Static(2, "two")},
        {"size": 5},
        {"other": np.zeros(3, np.float32)},
        {"other": np.zeros(3, np.int32)},
    ],
)
def test_other_arguments_are_traced(changed):
    assert run()
    assert run(**changed)
    assert not run(**changed)
    assert not run()


def plant_version(monkeypatch):
    version = kept_programs._version
    monkeypatch.setattr(kept_programs, "_version", lambda name: "99" if name == "jaxlib" else version(name))


def plant_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")


def plant_processor(monkeypatch):
    found = kept_programs.kernels.machine()
    monkeypatch.setattr(kept_programs.kernels, "machine", lambda: (*found[:-1], "another processor"))


def plant_source(monkeypatch):
    monkeypatch.setattr(kept_programs, "sources_key", lambda *paths: "of other sources")


def test_keys_have_the_sources_of_kernels(monkeypatch):
    folders = []
    monkeypatch.setattr(kept_programs, "sources_key", lambda *paths: folders.extend(paths) or "")
    assert kept_programs.kernels.sources_digest() in kept_programs._surroundings.__wrapped__()  # of cpu_kernels
    assert [folder.name for folder in folders if list(folder.glob("*.py"))] == ["jaxinfer", "pallas_kernels"]


@pytest.mark.parametrize("plant", [plant_version, plant_flags, plant_processor, plant_source])
def test_an_old_program_never_runs(monkeypatch, plant):
    assert run()
    kept_programs._surroundings.cache_clear()
    assert not run()
    plant(monkeypatch)
    kept_programs._surroundings.cache_clear()
    assert run()


@pytest.mark.parametrize(
    "around",
    [
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])),
    ],
    ids=["precision", "mesh"],
)
def test_a_setting_around_a_call_is_in_the_key(around):
    assert run()
    with around():
        assert run()
        assert not run()
    assert not run()


def test_every_source_of_the_product_is_in_the_key(tmp_path):
    from jaxinfer.kept_files import sources_key

    (tmp_path / "models").mkdir()
    source = tmp_path / "models" / "layers.py"
    keys = set()
    for text in ("x = 1", "x = 2"):
        source.write_text(text)
        sources_key.cache_clear()
        keys.add(sources_key(tmp_path))
    assert len(keys) == 2


@pytest.mark.parametrize("damage", [lambda raw: raw[:-100], lambda raw: raw[:60], lambda raw: b"foreign" * 99])
def test_damaged_entries_are_made_again_with_a_line_in_the_log(caplog, tmp_path, damage):
    assert run()
    (path,) = entries(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert run()
    assert [record.getMessage().count(str(path)) for record in caplog.records] == [1]
    assert not run()


@pytest.mark.matrix
@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0{}", b"\x02\0\0\0{}no program", b"\xff\xff\xff\xff"])
def test_contents_that_are_no_program_are_made_again(monkeypatch, caplog, content):
    keys = []
    write = KeptFiles.write
    monkeypatch.setattr(KeptFiles, "write", lambda self, key, raw: (keys.append(key), write(self, key, raw))[1])
    assert run()
    KeptFiles.of("programs").write(keys[0], content)
    with caplog.at_level(logging.WARNING):
        assert run()
    assert sum("of no use" in record.getMessage() for record in caplog.records) == 1
    assert not run()


def test_another_program_s_content_is_not_run(monkeypatch, caplog):
    """As two keys that are equal would be."""
    keys = []
    write = KeptFiles.write
    monkeypatch.setattr(KeptFiles, "write", lambda self, key, raw: (keys.append(key), write(self, key, raw))[1])
    assert run(size=4)
    assert run(size=5)
    files = KeptFiles.of("programs")
    files.write(keys[0], files.read(keys[1]))
    assert run(size=4)
    assert "its arguments are others" in caplog.text


def test_programs_are_kept_without_the_compiler_of_cpu_kernels(monkeypatch, tmp_path):
    """As in an installation for a GPU, which has neither Numba nor llvmlite."""
    for package in ("numba", "llvmlite", "llvmlite.binding"):
        monkeypatch.setitem(sys.modules, package, None)
    kernels.machine.cache_clear()
    assert run()
    assert not run()
    assert len(entries(tmp_path)) == 1


def test_what_another_process_cannot_name_is_not_kept(tmp_path):
    class Nameless:
        factor = 2

    assert run(Nameless())
    assert run(Nameless())
    assert entries(tmp_path) == []


def test_results_of_another_structure_are_refused():
    program = compiling.LargeProgram(
        accumulate, outputs=lambda static, state, x: state, static_argnums=0, donate_argnums=1
    )
    with pytest.raises(RuntimeError, match="accumulate has results of the structure"):
        run(program=program)
