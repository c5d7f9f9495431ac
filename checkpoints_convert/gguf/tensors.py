"""Planning: which tensors of a GGUF file every parameter is read from, by names and shapes.

Names are those of gguf-py's constants.py. One table serves all architectures, since the configuration decides which
parameters a model has.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from checkpoints_convert.checkpoint import ParamPath, param_shapes
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.architectures import Architecture
from checkpoints_convert.gguf.file import GGUFTensorEntry
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.huggingface.rules import INDEX, TensorGroup, TensorPlacement, TensorRule, layout, linear, norm
from jaxinfer.checks import did_you_mean
from jaxinfer.models import ModelConfig

_LAYER, _TARGET = "blk.{layer}", "layers.{layer}"
_QKV = tuple(f"{_TARGET}.attention.{name}" for name in ("q_proj", "k_proj", "v_proj"))
_GATE, _UP, _DOWN = (f"{_TARGET}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
_TWO_NORMS = ("block", "parallel_two_norms")
# Factors of the rotation, which config.json has, or which no implementation uses beside others.
_NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NUM_HINTS, _NUM_COMPARED = 20, 500  # nearest names are looked up for so many problems, among so many names


@dataclass(frozen=True)
class GGUFTensorPlan:
    """How a parameter is read from the tensors of a GGUF file.

    Attributes:
      sources: the tensor that holds it, or those that are stacked along its first axis. entry: of the first.
      target: path of the parameter. shape: of the parameter.
      placement: of the parameter in a tensor.
    """

    sources: tuple[str, ...]
    entry: GGUFTensorEntry
    target: ParamPath
    shape: tuple[int, ...]
    placement: TensorPlacement

    @property
    def stays_quantized(self) -> bool:
        """Whether the parameter stays quantized: weights of linear layers and embeddings do."""
        is_product = self.target[-1] == "weight" and self.target[-2].endswith("_proj")
        return self.entry.kind.is_quantized and (is_product or self.target in (("embed",), ("lm_head",)))


def plan_tensors(index: GGUFIndex, architecture: Architecture, config: ModelConfig) -> list[GGUFTensorPlan]:
    """The plans of all parameters, in the order of computation.

    Raises CheckpointError for parameters without a tensor, tensors that are not used, and shapes that do not fit, all
    at once, each with the nearest name.
    """
    found = layout(_rules(architecture.adds_one), config, architecture.pairs_neighbours)
    plans, problems, missing = [], [], []
    used: set[str] = set()
    for target, shape in param_shapes(config).items():
        tensor_groups = found.of_target[target]
        present = [group for group in tensor_groups if all(name in index.tensors for name in group.sources)]
        if not present:
            missing.append((tensor_groups[0].sources[0], _placement(tensor_groups[0], target).stored))
            continue
        fitting = [group for group in present if _fits(index, group, target)]
        group = (fitting or present)[0]
        placement = _placement(group, target)
        used.update(group.sources)
        if not fitting:
            problems += [
                f"tensor {name!r} has shape {list(index.entry(name).shape)}, the metadata make it"
                f" {list(placement.stored)}"
                for name in group.sources
                if not _is_shape(index.entry(name).shape, placement.stored)
            ]
        plans.append(GGUFTensorPlan(tuple(group.sources), index.entry(group.sources[0]), target, shape, placement))
    problems += _kind_problems(index, plans)
    problems += _unmatched(missing, [name for name in index.tensors if name not in {*used, *_NOT_PARAMETERS}])
    if problems:
        raise CheckpointError(index.path, *problems)
    return plans


def _fits(index: GGUFIndex, group: TensorGroup, target: ParamPath) -> bool:
    return all(_is_shape(index.entry(name).shape, _placement(group, target).stored) for name in group.sources)


def _is_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape is the wanted one; a single row may be stored as a vector."""
    return found == wanted or (len(wanted) == 2 and wanted[0] == 1 and found == wanted[1:])


def _placement(group: TensorGroup, target: ParamPath) -> TensorPlacement:
    return next(placement for placement in group.placements if placement.target == target)


def _kind_problems(index: GGUFIndex, plans: Iterable[GGUFTensorPlan]) -> list[str]:
    problems = []
    for plan in plans:
        kinds = sorted({index.entry(name).kind.name for name in plan.sources})
        if len(kinds) > 1:
            problems.append(f"tensor {plan.sources[0]!r} and those stacked with it are stored as {' and '.join(kinds)}")
    return problems


def _unmatched(missing: list[tuple[str, tuple[int, ...]]], extra: list[str]) -> list[str]:
    names = [name for name, _ in missing][:_NUM_COMPARED]
    problems = []
    for number, (name, shape) in enumerate(missing):
        near = did_you_mean(name, extra[:_NUM_COMPARED], cutoff=0.8) if number < _NUM_HINTS else ""
        problems.append(f"tensor {name!r} {list(shape)} is missing{near}")
    for number, name in enumerate(extra):
        near = did_you_mean(name, names, cutoff=0.8) if number < _NUM_HINTS else ""
        problems.append(f"tensor {name!r} is not of this model{near}")
    return problems


_ATTENTION, _MLP = f"{_TARGET}.attention", f"{_TARGET}.mlp"
_LATENT_ATTENTION = (
    *linear(f"{_LAYER}.attn_q_a", f"{_ATTENTION}.q_a_proj"),
    *norm(f"{_LAYER}.attn_q_a_norm", f"{_ATTENTION}.q_a_norm"),
    *linear(f"{_LAYER}.attn_q_b", f"{_ATTENTION}.q_b_proj"),
    *linear(f"{_LAYER}.attn_kv_a_mqa", f"{_ATTENTION}.kv_a_proj"),
    *norm(f"{_LAYER}.attn_kv_a_norm", f"{_ATTENTION}.kv_a_norm"),
    # Files of 2025 and later have the two halves apart, [heads, latent, keys] and [heads, values, latent].
    TensorRule(f"{_LAYER}.attn_k_b.weight", (f"{_ATTENTION}.k_up.weight",)),
    TensorRule(f"{_LAYER}.attn_v_b.weight", (f"{_ATTENTION}.v_up.weight",), transpose=True),
    TensorRule(
        f"{_LAYER}.attn_kv_b.weight",
        (f"{_ATTENTION}.k_up.weight", f"{_ATTENTION}.v_up.weight"),
        transpose=True,
        stack="num_heads",
    ),
)
_EXPERTS = (
    *linear(f"{_LAYER}.ffn_gate_inp", f"{_MLP}.router"),
    TensorRule(f"{_LAYER}.exp_probs_b.bias", (f"{_MLP}.router.correction",)),
    *(
        rule
        for name in ("gate", "up", "down")
        for rule in (
            *linear(f"{_LAYER}.ffn_{name}_exps", f"{_MLP}.experts.{name}_proj"),
            TensorRule(f"{_LAYER}.ffn_{name}.{INDEX}.weight", (f"{_MLP}.experts.{name}_proj.weight",), transpose=True),
            *linear(f"{_LAYER}.ffn_{name}_shexp", f"{_MLP}.shared.{name}_proj"),
        )
    ),
    TensorRule(f"{_LAYER}.ffn_gate_inp_shexp.weight", (f"{_MLP}.shared_gate",), transpose=True),
)


@lru_cache(maxsize=2)
def _rules(adds_one: bool) -> tuple[TensorRule, ...]:
    add = {"add": -1.0} if adds_one else {}
    return (
        TensorRule("token_embd.weight", ("embed",)),
        TensorRule("position_embd.weight", ("position_embed",)),
        # Falcon's attention reads attn_norm_2 where there is one, and its MLP attn_norm.
        *norm(f"{_LAYER}.attn_norm_2", f"{_TARGET}.attention_norm", when=_TWO_NORMS),
        *norm(f"{_LAYER}.attn_norm", f"{_TARGET}.attention_norm", **add),
        *linear(f"{_LAYER}.attn_q", _QKV[0], is_rotated=True),
        *linear(f"{_LAYER}.attn_k", _QKV[1], is_rotated=True),
        *linear(f"{_LAYER}.attn_v", _QKV[2]),
        *linear(f"{_LAYER}.attn_qkv", *_QKV),
        *linear(f"{_LAYER}.attn_output", f"{_TARGET}.attention.o_proj"),
        *norm(f"{_LAYER}.attn_q_norm", f"{_TARGET}.attention.q_norm", is_rotated=True, **add),
        *norm(f"{_LAYER}.attn_k_norm", f"{_TARGET}.attention.k_norm", is_rotated=True, **add),
        *norm(f"{_LAYER}.post_attention_norm", f"{_TARGET}.attention_post_norm", **add),
        *norm(f"{_LAYER}.ffn_norm", f"{_TARGET}.mlp_norm", **add),
        *norm(f"{_LAYER}.attn_norm", f"{_TARGET}.mlp_norm", when=_TWO_NORMS),
        *norm(f"{_LAYER}.post_attention_norm", f"{_TARGET}.mlp_norm", when=("block", "pre_norm")),  # gpt-oss's name
        TensorRule(f"{_LAYER}.attn_sinks.weight", (f"{_TARGET}.attention.sinks",)),
        *_LATENT_ATTENTION,
        *_EXPERTS,
        *linear(f"{_LAYER}.ffn_gate", _GATE),
        *linear(f"{_LAYER}.ffn_up", _UP),
        *linear(f"{_LAYER}.ffn_up", _GATE, _UP),
        *linear(f"{_LAYER}.ffn_down", _DOWN),
        *norm(f"{_LAYER}.post_ffw_norm", f"{_TARGET}.mlp_post_norm", **add),
        *norm("output_norm", "final_norm", **add),
        TensorRule("output.weight", ("lm_head",), transpose=True),
        TensorRule("output.bias", ("lm_head_bias",)),
    )
