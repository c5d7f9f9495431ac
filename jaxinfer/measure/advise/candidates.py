"""What a search tries: single changes of a model's options, and those that are left out, with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.measure.advise.goals import Arguments, Goal

WEIGHTS = ("int8", "int4-g128")
METHODS = ("awq", "gptq")  # of calibration, to 4 bits
CACHES = ("int8", "fp8_e4m3")
SMALL_CACHES = ("int8_int4", "int4")
# Values of kv_policy, a line for each; what they keep is these parts of the longest request. The KL is of prompts, in
# which a policy has to drop what it drops of answers.
POLICIES = ("sinks(4)+window({tokens})",)
# These compact prompts. Their KL is of the second half of each text, after a prompt of the first.
PROMPT_POLICIES = ("snapkv({tokens})", "h2o({tokens})")
KEPT_PARTS = (2, 4)
LONG = 2048  # tokens of a request from which on reading the cache takes time
LEAST_PROMPT = 128  # tokens of a prompt: half of it is more than what a policy looks at
LEAST_DROPPED = 256  # tokens of a request: a policy keeps whole pages
# Share of the prompts' tokens; prompts cut from texts have a token or two in common by chance.
LEAST_SHARED = 0.05
# Drafts of the model's own first layers, as shares of them. A round of k drafted tokens takes 1 + k c steps, where c is
# the draft's share of the model's time. At c of 0.1 to 0.2, with 70 to 80 % of drafts accepted, the best k makes 1.6 to
# 2.5 tokens a step; at c of 0.5 and 80 % it makes 1.2; drafts of a few percent are accepted too seldom.
DRAFT_SHARES = (0.1, 0.2)
LEAST_LAYERS = 5  # of a model of which one layer is not more than that


@dataclass(frozen=True)
class ModelFacts:
    """Facts that decide which trials make sense.

    Attributes:
      given: arguments of `LLM` that the user gave. is_quantized: whether the checkpoint's weights are quantized.
      caches_values: whether its cache has values beside keys. sizes: of max_seqs to try. default_size: of max_seqs.
      drafts: names. shared: share of prompt tokens in common prefixes; None if there are no prompts.
      longest: tokens of the longest request, its answer included.
      has_limits: whether users are counted by requests within limits.
      prompt: tokens of the longest prompt. num_layers: of the model. meshes: to try. has_calibration: whether there is
        text to calibrate weights on. why_no_offload: why layers in the host's memory are not tried; None if they are.
    """

    given: Mapping[str, Any]
    is_quantized: bool
    caches_values: bool
    sizes: Sequence[int]
    default_size: int
    drafts: Sequence[str]
    shared: float | None
    longest: int
    has_limits: bool = False
    prompt: int = 0
    num_layers: int = 0
    meshes: Sequence[str] = ()
    has_calibration: bool = False
    why_no_offload: str | None = "the model fits: copying layers in each step only takes time"


def candidates(goal: Goal, about: ModelFacts) -> tuple[list[Arguments], dict[str, str]]:
    """Single changes to try, the most promising first, and those that are not tried, with the reason. Options that the
    user gave are not tried."""
    left_out: dict[str, str] = {}
    weights = _unless(left_out, "weights", _why_no_weights(about), [{"quantize": name} for name in WEIGHTS])
    why = None if about.has_calibration else "give a text with --calibration FILE"
    methods = [] if "weights" in left_out else [{"method": name} for name in METHODS]
    weights += _unless(left_out, "calibrated weights", why, methods) if methods else []
    caches = [{"kv_dtype": name} for name in CACHES if about.caches_values or name != "int8"]
    caches = _unless(left_out, "cache", _given(about, "kv_dtype"), caches)
    small = [{"kv_dtype": name} for name in SMALL_CACHES if about.caches_values]
    why = None if "cache" in left_out else _why_no_small_cache(goal, about)
    caches += [] if "cache" in left_out else _unless(left_out, "cache of 4 bits", why, small)
    texts = [text.format(tokens=about.longest // part) for text in POLICIES for part in KEPT_PARTS]
    if about.shared is not None and about.prompt >= LEAST_PROMPT:
        texts += [text.format(tokens=about.prompt // 2) for text in PROMPT_POLICIES]
    policies = [{"kv_policy": text} for text in texts]
    policies = _unless(left_out, "policies of the cache", _why_no_policies(goal, about), policies)
    sizes = [{"max_seqs": size} for size in about.sizes if size != about.default_size]
    sizes = _unless(left_out, "batch sizes", _why_no_sizes(goal, about), sizes)
    why = "a draft takes memory from the cache" if _counts_memory(goal, about) else None
    names = [*about.drafts, *_layer_drafts(about)]
    drafts = _unless(left_out, "drafts", why, [{"draft": name} for name in names])
    reuse = _unless(left_out, "prefix reuse", _why_no_reuse(goal, about), [{"prefix_cache": False}])
    halves = dict.fromkeys((about.num_layers // 2, about.num_layers)) if about.num_layers else ()
    why = _given(about, "offload", "mesh") or about.why_no_offload
    offload = _unless(left_out, "offload", why, [{"offload": count} for count in halves if count])
    meshes = _unless(left_out, "meshes", _why_no_meshes(about), [{"mesh": mesh} for mesh in about.meshes])
    if goal.name == "latency":
        meshes = [one for one in meshes if "data" not in one["mesh"]]  # replicas do not make one request faster
        return [*drafts, *meshes, *weights, *caches, *policies, *reuse, *offload], left_out
    if goal.name == "users" and not about.has_limits:
        return [*caches, *policies, *weights, *meshes, *offload], left_out
    return [*sizes, *meshes, *weights, *drafts, *reuse, *caches, *policies, *offload], left_out


def _layer_drafts(about: ModelFacts) -> list[str]:
    """Drafts of the model's own first layers, where the user has no draft."""
    if about.num_layers < LEAST_LAYERS or list(about.drafts) != ["ngram"]:
        return []
    counts = dict.fromkeys(max(round(share * about.num_layers), 1) for share in DRAFT_SHARES)
    return [f"layers:{count}" for count in counts]


def _unless(left_out: dict[str, str], what: str, why: str | None, found: list[Arguments]) -> list[Arguments]:
    if why is None:
        return found
    left_out[what] = why
    return []


def _given(about: ModelFacts, *names: str) -> str | None:
    name = next((name for name in names if name in about.given), None)
    return None if name is None else f"you gave --{name.replace('_', '-')}"


def _why_no_weights(about: ModelFacts) -> str | None:
    if (why := _given(about, "quantize", "requantize")) is not None:
        return why
    return "the checkpoint's weights are quantized already" if about.is_quantized else None


def _why_no_small_cache(goal: Goal, about: ModelFacts) -> str | None:
    """A small cache saves memory, and time where reading the cache takes some."""
    if not about.caches_values:
        return "its cache has no values beside keys"
    if goal.memory is not None or _counts_memory(goal, about) or about.longest >= LONG:
        return None
    return f"memory is not limited (--memory GIB), and requests of {about.longest:,} tokens read little cache"


def _why_no_policies(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "kv_policy")) is not None:
        return why
    if about.longest < LEAST_DROPPED:
        return f"requests of {about.longest} tokens are short: there is little to drop"
    return _why_no_small_cache(goal, about)


def _why_no_meshes(about: ModelFacts) -> str | None:
    return _given(about, "mesh", "offload") or (None if about.meshes else "there is one device")


def mesh_shapes(num_devices: int) -> list[str]:
    """All ways to divide devices into replicas and shards."""
    found = []
    for shards in range(num_devices, 0, -1):
        if num_devices > 1 and num_devices % shards == 0:
            sizes = {"data": num_devices // shards, "model": shards}
            found.append(",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1))
    return found


def _why_no_sizes(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "max_seqs")) is not None:
        return why
    if goal.name == "latency":
        return "they do not affect a single request"
    return "without --goodput, users are counted by tokens of cache" if _counts_memory(goal, about) else None


def _why_no_reuse(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "prefix_cache")) is not None:
        return why
    if about.shared is None:
        return "its benefit depends on the prompts, and nothing runs"
    if _counts_memory(goal, about):
        return "without --goodput, users are counted by tokens of cache"
    if about.shared < LEAST_SHARED:
        return (
            f"on by default, and {about.shared:.0%} of the prompts' tokens are in common prefixes (--shared-prefix N)"
        )
    return None


def _counts_memory(goal: Goal, about: ModelFacts) -> bool:
    return goal.name == "users" and not about.has_limits
