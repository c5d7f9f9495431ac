"""Faults in what makes a GPU's step few launches: joined weights, fused additions, packed outputs, one graph."""

from tests.faults.fault import Fault

BESIDE = "tests/quantization/test_side_by_side.py::"
NORMS = "tests/pallas_kernels/norm/test_norm.py::"
STEPS = "tests/planning/test_step_model.py::"

FAULTS = (
    Fault(
        "quantization/outputs-of-shards-are-split-as-of-one",
        "jaxinfer/quantization/side_by_side.py",
        "        if self.num_shards == 1:",
        "        if self.num_shards:",
        (BESIDE + "test_shards_hold_their_parts_of_every_weight",),
        "on a mesh queries of one device are taken for keys of another",
    ),
    Fault(
        "quantization/a-part-is-cut-out-at-another-s-place",
        "jaxinfer/quantization/side_by_side.py",
        "begin, total = sum(self.sizes[:number]), sum(self.sizes)",
        "begin, total = sum(self.sizes[: number + 1]) - self.sizes[0], sum(self.sizes)",
        (BESIDE + "test_products_and_parts_are_those_of_each_weight",),
        "fingerprints and saved checkpoints have keys in the place of values",
    ),
    Fault(
        "quantization/weights-with-codebooks-are-joined",
        "jaxinfer/quantization/side_by_side.py",
        "if first.codebook is not None or any(",
        "if any(",
        (BESIDE + "test_weights_that_differ_stay_apart",),
        "keys are multiplied with the sum of three codebooks",
    ),
    Fault(
        "quantization/joined-weights-stay-beside-their-parts",
        "jaxinfer/quantization/side_by_side.py",
        "        if donate:\n",
        "        if False:\n",
        (BESIDE + "test_a_gpu_s_weights_lie_side_by_side_and_are_freed_and_replaced",),
        "a model takes half as much memory again on a GPU",
    ),
    Fault(
        "kernels/a-norm-s-sum-lacks-the-term",
        "pallas_kernels/norm/pallas_gpu.py",
        'refs["sum"][row, :] = x',
        'refs["sum"][row, :] = load(refs["x"], (row, slice(None)))',
        (NORMS + "test_against_float64",),
        "on a GPU the residual stream never gets what layers add",
    ),
    Fault(
        "kernels/a-norm-without-epsilon-on-a-gpu",
        "pallas_kernels/norm/pallas_gpu.py",
        "/ width + spec.eps)",
        "/ width)",
        (NORMS + "test_zeros_are_no_numbers_less",),
        "hidden states of zeros become NaN",
    ),
    Fault(
        "sampling/rows-without-work-choose-the-branch",
        "jaxinfer/sampling/sampler.py",
        "jnp.any(is_more_than_masked(used(), state))",
        "jnp.any(is_more_than_masked(batch, state))",
        ("tests/sampling/test_sampler.py::test_rows_that_are_not_used_choose_no_branch",),
        "a finished request with top-p keeps all others in the slow branch",
    ),
    Fault(
        "sampling/flags-are-packed-as-floats",
        "jaxinfer/sampling/packed.py",
        "parts.append(part != 0 if dtype == jnp.bool_ else lax.bitcast_convert_type(part, dtype))",
        "parts.append(part > 0 if dtype == jnp.bool_ else part.astype(dtype))",
        ("tests/sampling/test_packed.py::test_every_bit_comes_back",),
        "log-probabilities of a dispatch are the integers of their bits",
    ),
    Fault(
        "engine/the-loop-is-in-no-graph",
        "jaxinfer/engine/compiling.py",
        "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
        "DYNAMIC_SLICE_FUSION",
        ("tests/engine/test_compiling.py::test_a_loop_on_a_gpu_is_one_graph",),
        "the host reads a predicate in every step",
    ),
    Fault(
        "planning/a-conditional-s-waits-are-not-counted",
        "pallas_kernels/gpu_launches.py",
        "return 1 + min(inside, default=0)",
        "return min(inside, default=0)",
        ("tests/pallas_kernels/test_gpu_launches.py::test_a_plan_is_read",),
        "a program that waits for the host passes as one graph",
    ),
    Fault(
        "planning/attention-is-never-bound-by-instructions",
        "jaxinfer/planning/step_model.py",
        "return rate if slots is None else min(rate,",
        "return rate if slots is not None else max(rate,",
        (STEPS + "test_issue_slots_bound_attention",),
        "a cache of 4 bits is predicted to be read at a copy's rate",
    ),
    Fault(
        "planning/launches-take-no-time",
        "jaxinfer/planning/step_model.py",
        "return self.weights + self.attention + self.small",
        "return self.weights + self.attention",
        (STEPS + "test_by_hand",),
        "small models are predicted at the roofline",
    ),
)
