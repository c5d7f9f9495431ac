"""Faults in deterministic engines: the one shape of their passes, and when they are chosen."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "determinism/rows-are-multiplied-at-the-public-rate",
        "jaxinfer/engine/determinism.py",
        "rates.compute_seconds(flops) / share_of_flops(",
        "rates.compute_seconds(flops) / (lambda *_: 1.0)(",
        ("tests/engine/test_determinism.py",),
        "a deterministic engine on a v6e takes 5 % longer for a token than the weights",
    ),
    Fault(
        "determinism/decoding-has-as-many-rows-as-slots",
        "jaxinfer/engine/determinism.py",
        "return (self.num_rows,) if self.is_on else ()",
        "return ()",
        ("tests/engine/test_uniform_steps.py",),
        "a token that is decoded has other bits than the same token in a prompt",
    ),
    Fault(
        "determinism/steps-of-a-dispatch-attend-as-decoding-does",
        "jaxinfer/engine/programs/paged.py",
        "caches, logits, _ = _one_pass(model, decoder, caches, slots, rows, True, observer)",
        "caches, logits, _ = _one_pass(model, decoder, caches, slots, rows, False, observer)",
        ("tests/engine/test_uniform_steps.py",),
        "attention of one token is summed in another order than that of a prompt",
    ),
    Fault(
        "determinism/auto-meets-options-that-refuse-it",
        "jaxinfer/engine/determinism.py",
        "if (refusal := _refusal(spec)) is not None:",
        "if (refusal := None) is not None:",
        ("tests/engine/test_determinism.py",),
        "an engine with a tree of drafts is called deterministic and is not",
    ),
    Fault(
        "determinism/the-output-layer-decides-for-small-models",
        "jaxinfer/engine/spec.py",
        "if self.determinism is None:",
        "if True:",
        ("tests/engine/test_determinism.py",),
        "a plan compiles programs of other shapes than the engine runs",
    ),
    Fault(
        "determinism/prompts-take-more-rows-than-a-step-has",
        "jaxinfer/engine/scheduler.py",
        "budget = min(budget, self.options.max_step_tokens - num_decoding)",
        "pass",
        ("tests/engine/test_scheduler_examples.py",),
        "a deterministic engine stops with StopIteration when prompts come while others decode",
    ),
    Fault(
        "determinism/every-part-of-an-item-is-its-first",
        "pallas_kernels/paged_attention/tpu_kernel.py",
        "positions += part.first // program.group_rows",
        "pass",
        (
            "tests/pallas_kernels/paged_attention/test_pallas_tpu.py::test_uniform_bits_do_not_depend_on_where_a_prompt_is_cut",
        ),
        "on a TPU the later tokens of a chunk see as few keys as the first",
    ),
    Fault(
        "determinism/a-part-less-for-the-last-queries",
        "pallas_kernels/paged_attention/tpu_kernel.py",
        "lax.fori_loop(first, pl.cdiv(item.count, queries), one, None)",
        "lax.fori_loop(first, item.count // queries, one, None)",
        (
            "tests/pallas_kernels/paged_attention/test_pallas_tpu.py::test_uniform_bits_do_not_depend_on_where_a_prompt_is_cut",
        ),
        "on a TPU a single token of a deterministic engine attends to nothing",
    ),
    Fault(
        "determinism/sums-of-products-are-cut-into-parts",
        "jaxinfer/engine/compiling.py",
        '"xla_gpu_experimental_force_split_k": 1,',
        '"xla_gpu_experimental_force_split_k": 0,',
        ("tests/engine/test_compiling.py::test_a_gpu_sums_each_product_at_once",),
        "on a GPU the order of a sum follows from the number of rows, and the parts are written and read",
    ),
)
