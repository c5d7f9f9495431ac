"""Names that changed still work for one release, and warn."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "former", "name"),
    [
        ("jaxinfer.sampling", "quiet", "mask_inactive_rows"),
        ("jaxinfer.speculative", "Rows", "DraftRows"),
        ("jaxinfer.planning", "Plan", "MemoryPlan"),
        ("pallas_kernels.paged_attention", "Choice", "KernelChoice"),
        ("pallas_kernels.flash_attention", "Choice", "KernelChoice"),
        ("jaxinfer.parallel", "fit", "fit_to_mesh"),
    ],
)
def test_a_former_name_warns(module, former, name):
    module = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=name):
        found = getattr(module, former)
    assert found.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'former_name'"):
        module.former_name  # noqa: B018


def test_a_former_package_warns():
    from jaxinfer.measure.profiling.run import profile

    sys.modules.pop("jaxinfer.profiling", None)
    with pytest.warns(DeprecationWarning, match=r"jaxinfer\.measure\.profiling"):
        former = importlib.import_module("jaxinfer.profiling.run")
    assert former.profile.__name__ == profile.__name__
