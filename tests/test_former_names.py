"""Names that changed still work for one release, and warn."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "former", "name"),
    [
        ("jaxinfer.sampling", "quiet", "mask_inactive_rows"),
        ("jaxinfer.speculative", "Rows", "DraftRows"),
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
