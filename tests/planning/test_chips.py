"""Chips and places: every figure has a source, and names are read as people write them."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from jaxinfer.planning import chip_of_kind, chips, parse_place
from jaxinfer.planning.chips import larger_places
from pallas_kernels import ahead_of_time


def test_every_chip_has_figures_and_sources():
    for chip in chips().values():
        assert 0 < chip.usable_bytes <= chip.hbm_bytes < 2**38, chip
        assert 10**11 < chip.hbm_bandwidth < 10**13, chip
        assert 10**13 < chip.flops["bf16"] < 10**16, chip
        assert set(chip.flops) == {"bf16", "int8", "fp8"}
        sourced = [figure for source in chip.sources for figure in source.figures]
        assert {"hbm_bytes", "usable_bytes", "hbm_bandwidth", "flops", "link_bandwidth", "host_bandwidth"} <= set(
            sourced
        ), chip
        assert len(set(sourced)) == len(sourced)
        assert all(source.title and source.date[:2] == "20" for source in chip.sources)
        assert any(source.url is not None and source.url.startswith("https://") for source in chip.sources), chip
        # What a second of reading and of computing can do: within what any chip has had.
        assert 50 < chip.flops["bf16"] / chip.hbm_bandwidth < 1000, chip


def test_caches_are_those_of_gpus_and_have_a_source():
    for chip in chips().values():
        sourced = any("l2_bytes" in source.figures for source in chip.sources)
        assert sourced == (chip.platform == "gpu" and chip.l2_bytes is not None), chip
        assert (chip.l2_bytes == 0) == (chip.platform == "tpu")
    assert chips()["h100"].l2_bytes == 50 * 2**20


def test_rates_to_the_host_are_on_the_page_and_those_of_tpus_are_estimates():
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for name, chip in chips().items():
        assert 10**10 < chip.host_bandwidth < chip.link_bandwidth, name
        [source] = [source for source in chip.sources if "host_bandwidth" in source.figures]
        assert source.title.startswith("Estimate") == (chip.platform == "tpu")
        [row] = [
            line
            for line in page.splitlines()
            if f"`{name}`" in line and f"{chip.host_bandwidth / 1e9:.0f} GB/s |" in line
        ]
        assert ("estimate" in row) == (chip.platform == "tpu")


def test_the_file_says_nothing_that_is_not_read():
    data = json.loads(files("jaxinfer").joinpath("chips.json").read_text())
    assert set(data) == {"about", "chips"}
    assert {"v4", "v5e", "v5p", "v6e", "tpu7x", "a100-40", "a100-80", "h100", "h200", "b200", "l4"} <= set(
        data["chips"]
    )


def test_memory_of_gpus_is_what_their_drivers_report():
    """nvidia-smi's memory.total, as the source says."""
    gib = {"a100-40": 40.0, "a100-80": 80.0, "h100": 79.65, "h200": 140.40, "b200": 179.06, "l4": 22.49}
    for name, size in gib.items():
        assert chips()[name].hbm_bytes / 2**30 == pytest.approx(size, abs=0.01)
    for chip in chips().values():
        [source] = [source for source in chip.sources if "hbm_bytes" in source.figures]
        if chip.platform == "gpu":
            assert f"memory.total: {chip.hbm_bytes // 2**20:,} MiB" in source.title


def test_the_page_has_the_figures_of_every_chip():
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for name, chip in chips().items():
        whole, usable = (size / chip.devices_per_chip / 2**30 for size in (chip.hbm_bytes, chip.usable_bytes))
        figures = (
            chip.devices_per_chip,
            f"{whole:.1f} GiB",
            f"{usable:.1f} GiB",
            f"{chip.hbm_bandwidth / 1e9:,.0f} GB/s",
        )
        assert f"| {' | '.join(map(str, (f'`{name}`', *figures)))} |" in page, name


def test_chips_that_compile_have_a_compiler():
    assert {name for name, chip in chips().items() if chip.can_compile} == set(ahead_of_time.CHIPS)


@pytest.mark.parametrize(
    ("text", "chip", "num_chips", "num_devices"),
    [
        ("v6e:1x1", "v6e", 1, 1),
        ("v6e:2x4", "v6e", 8, 8),
        ("v5p:2x2x1", "v5p", 4, 4),
        ("v4:2x2x1", "v4", 4, 4),
        ("tpu7x", "tpu7x", 1, 2),
        ("tpu7x:2x2x1", "tpu7x", 4, 8),
        ("h200x1", "h200", 1, 1),
        ("h200", "h200", 1, 1),
        ("a100-80x8", "a100-80", 8, 8),
        ("rtx-4090x2", "rtx-4090", 2, 2),
    ],
)
def test_places(text, chip, num_chips, num_devices):
    place = parse_place(text)
    assert (place.chip.name, place.num_chips, place.num_devices) == (chip, num_chips, num_devices)
    assert place.device_bytes * place.num_devices <= place.num_chips * place.chip.hbm_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no chips are named"),
        ("v6:2x2", "did you mean 'v6e'"),
        ("abacus", "known are v4"),
        ("h200:2x2", "GPUs are written h200x4"),
        ("h200x16", "from 1 to 8"),
        ("v5e:0x2", "0 chips"),
    ],
)
def test_what_is_no_place(text, message):
    with pytest.raises(ValueError, match=message):
        parse_place(text)


def test_more_chips():
    assert [place.name for place in larger_places(parse_place("v6e:2x2"))][:2] == ["v6e:2x4", "v6e:4x4"]
    assert [place.name for place in larger_places(parse_place("h100x2"))] == ["h100x4", "h100x8"]
    assert larger_places(parse_place("v5e:16x16")) == []


def test_a_gpus_share_is_the_environments(monkeypatch):
    chips.cache_clear()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    try:
        assert chips()["h200"].usable_bytes == chips()["h200"].hbm_bytes // 2
    finally:
        chips.cache_clear()


def test_the_chip_at_hand():
    assert chip_of_kind("TPU v6 lite") is chips()["v6e"]
    assert chip_of_kind("NVIDIA H200") is chips()["h200"]
    assert chip_of_kind("cpu") is None
