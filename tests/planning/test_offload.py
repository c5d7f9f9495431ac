"""Plans of models whose layers are partly in the host's memory."""

from dataclasses import replace

import pytest

from jaxinfer.engine.offload import spread
from jaxinfer.models.host_layers import host_rows
from jaxinfer.planning import chips, make_plan
from jaxinfer.planning.compiled import chip_compiler, compile_programs
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HOST_SPACE, HloProgram
from tests.planning.plan_models import LLAMA_3_8B, LLAMA_3_70B, TINY


def test_a_model_that_does_not_fit_does_with_layers_on_the_host(ask):
    """Llama-3-70B, 141 GB, on one chip of 32 GiB: the step takes as long as the copies."""
    request = ask(LLAMA_3_70B, "v6e", max_model_len=2048, max_seqs=8)
    assert not make_plan(request, compiles=False).fits
    offloaded = make_plan(replace(request, offload="auto"), compiles=False)
    spec = replace(request, offload="auto").spec()
    assert offloaded.fits
    assert tuple(host_rows(spec.params)) == spread(len(host_rows(spec.params)), 80)
    point = offloaded.roofline[0]
    assert point.host_bytes == spec.arriving_bytes == spec.host_bytes
    assert point.host_seconds == pytest.approx(spec.host_bytes / chips()["v6e"].host_bandwidth)
    assert point.bound == "host"
    assert point.seconds == point.host_seconds
    assert point.tokens_per_second == pytest.approx(point.batch / point.host_seconds)
    assert offloaded.memory.parts["arriving layers"] == spec.buffer_bytes
    assert f"{len(host_rows(spec.params))} of 80 layers" in str(offloaded)


def test_the_bytes_of_the_device_go_down_by_what_moves(ask):
    request = ask(LLAMA_3_8B, "h100", max_model_len=2048, max_seqs=8)
    whole, half = (make_plan(replace(request, offload=count), compiles=False) for count in (0, 16))
    spec = replace(request, offload=16).spec()
    assert whole.memory.total - half.memory.total == spec.host_bytes - spec.buffer_bytes
    assert whole.counted == half.counted
    moved = [one.roofline[0].hbm_bytes for one in (whole, half)]
    assert moved[1] - moved[0] == spec.arriving_bytes  # written before they are read


def test_several_devices_are_refused(ask):
    with pytest.raises(ValueError, match=r"offload=4 is for one device, and the mesh has 4"):
        make_plan(replace(ask(LLAMA_3_8B, "v6e:2x2", max_model_len=2048, max_seqs=8), offload=4), compiles=False)


def test_copies_from_the_host_are_counted_in_a_program():
    """As a GPU's compiler writes them; a loop of three runs."""
    stack, row = f"f32[2,64,32]{{2,1,0:{HOST_SPACE}}}", "f32[1,64,32]{2,1,0}"
    text = f"""
%body (p: (s32[], {stack})) -> (s32[], {stack}) {{
  %p = (s32[], {stack}) parameter(0)
  %s = {stack} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %a = (({stack}, s32[]), {row}, u32[]) dynamic-slice-start(%s, %i)
  %b = {row} dynamic-slice-done(%a)
  ROOT %t = (s32[], {stack}) tuple(%i, %s)
}}

ENTRY %main (w: {stack}) -> s32[] {{
  %w = {stack} parameter(0)
  %i.1 = s32[] constant(0)
  %t.1 = (s32[], {stack}) tuple(%i.1, %w)
  %l = (s32[], {stack}) while(%t.1), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %r = s32[] get-tuple-element(%l), index=0
}}
"""
    assert HloProgram(text).host_bytes() == 3 * 64 * 32 * 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_plan_has_the_bytes_of_the_compiled_program(ask):
    """Of few layers extrapolated, and of shapes: within a tenth of what the whole program copies."""
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    request = replace(ask(replace(TINY, num_layers=12), "h100", max_model_len=256, max_seqs=4, page_size=16), offload=6)
    spec = request.spec(compiles=True)
    compiler = chip_compiler("h100", spec.mesh)
    whole, few = (compile_programs(spec, compiler, whole=how, only="decode")["decode"].figures for how in (True, False))
    print(f"{whole.host_bytes:,} copied, {few.host_bytes:,} extrapolated, {spec.arriving_bytes:,} by shapes")
    assert spec.arriving_bytes == pytest.approx(whole.host_bytes, rel=0.1)
    assert few.host_bytes == pytest.approx(whole.host_bytes, rel=0.1)
    assert few.argument_bytes == whole.argument_bytes
