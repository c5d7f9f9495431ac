"""Compiling for chips that are not at hand, and seeing them while tracing."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import ahead_of_time
from pallas_kernels.platform import current_platform
from tests.pallas_kernels.quick import quick


def compiler(chip: str) -> str:
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    return chip


@pytest.mark.matrix
@pytest.mark.parametrize("chip", quick(ahead_of_time.CHIPS, "v6e", "h100"))
def test_a_matrix_product_is_compiled_and_measured(chip):
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    found = ahead_of_time.compile_for(compiler(chip), lambda x, y: (x @ y, y.at[0].set(0)), x, y, donate_argnums=(1,))
    assert found.chip == chip
    assert found.argument_bytes == 2 * (256 * 512 + 512 * 512)
    assert found.aliased_bytes == 2 * 512 * 512
    if not chip.startswith("h"):
        assert found.cost["flops"] == pytest.approx(2 * 256 * 512 * 512, rel=0.01)
    assert "ENTRY" in found.program.as_text()


def test_a_mesh_compiles_for_all_its_devices_and_counts_one():
    mesh = ahead_of_time.mesh(compiler("v6e"), 4, "model")
    cut = NamedSharding(mesh, PartitionSpec("model", None))
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16, sharding=cut)
    product = jax.jit(lambda factor, x, y: factor * (x @ y), static_argnums=0)
    found = ahead_of_time.compile_for("v6e", product, 3, x, y, chip_mesh=mesh)
    assert found.argument_bytes == 2 * (64 * 4096 + 4096 * 512 // 4)
    assert "all-reduce" in found.program.as_text()
    with pytest.raises(ValueError, match=r"257 devices of v6e: .* has 256"):
        ahead_of_time.mesh("v6e", 257)


SLICES = [("v6e", (("data", 2), ("model", 2))), ("v5e", (("data", 2), ("model", 8))), ("h200", (("model", 8),))]


@pytest.mark.parametrize(("chip", "axes"), quick(SLICES, SLICES[0]))
def test_a_slice_has_as_many_devices_as_its_axes_need(chip, axes):
    mesh = ahead_of_time.slice_mesh(compiler(chip), axes)
    assert tuple(mesh.shape.items()) == axes
    assert len({device.id for device in mesh.devices.flat}) == mesh.size


@pytest.mark.parametrize(("chip", "platform"), [("v6e", "tpu"), ("h100", "gpu")])
def test_tracing_sees_the_chip(chip, platform):
    seen = []
    with ahead_of_time.as_if_on(compiler(chip)):
        jax.jit(lambda x: seen.append(current_platform()) or x).trace(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert seen == [platform]
    assert current_platform() == "cpu"


def test_an_unknown_chip_and_a_missing_compiler_are_named(monkeypatch):
    with pytest.raises(ValueError, match="'v99' is not one of v4, v5e"):
        ahead_of_time.missing_compiler("v99")
    monkeypatch.setattr(ahead_of_time.importlib.util, "find_spec", lambda name: None)
    assert ahead_of_time.missing_compiler("v6e") == "no compiler for v6e: libtpu is not installed"


def test_what_was_compiled_for_another_chip_is_not_kept():
    """A program compiled without its device cannot be read back, so the compilation cache must not hold it."""
    folder = Path(jax.config.values["jax_compilation_cache_dir"])

    def a_name_of_its_own(x):
        return jnp.linalg.norm(x @ x @ x) + 1

    for _ in range(2):
        ahead_of_time.compile_for(compiler("v6e"), a_name_of_its_own, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    assert not list(folder.rglob("*a_name_of_its_own*"))
