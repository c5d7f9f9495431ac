"""Trials of a search: single changes of a model's options, and those that are left out, with the reason."""

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
WHY_NO_OFFLOAD = "the model fits: copying layers in each step only takes time"


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
    why_no_offload: str | None = WHY_NO_OFFLOAD


def candidates(goal: Goal, about: ModelFacts) -> tuple[list[Arguments], dict[str, str]]:
    """Single changes to try, the most promising first, and those that are not tried, with the reason. Options that the
    user gave are not tried."""
    left_out: dict[str, str] = {}
    counts_memory = goal.name == "users" and not about.has_limits

    def given(*names: str) -> str | None:
        name = next((name for name in names if name in about.given), None)
        return None if name is None else f"you gave --{name.replace('_', '-')}"

    def unless(why: str | None, what: str, trials: list[Arguments]) -> list[Arguments]:
        if why is None:
            return trials
        left_out[what] = why
        return []

    why = given("quantize", "requantize")
    why = why or ("the checkpoint's weights are quantized already" if about.is_quantized else None)
    weights = unless(why, "weights", [{"quantize": name} for name in WEIGHTS])
    if weights:
        why = None if about.has_calibration else "give a text with --calibration FILE"
        weights += unless(why, "calibrated weights", [{"method": name} for name in METHODS])

    # A small cache saves memory, and time where reading the cache takes some.
    why_no_small_cache = None
    if not about.caches_values:
        why_no_small_cache = "its cache has no values beside keys"
    elif goal.memory is None and not counts_memory and about.longest < LONG:
        tokens = f"requests of {about.longest:,} tokens"
        why_no_small_cache = f"memory is not limited (--memory GIB), and {tokens} read little cache"
    caches = [{"kv_dtype": name} for name in CACHES if about.caches_values or name != "int8"]
    caches = unless(given("kv_dtype"), "cache", caches)
    if caches:
        caches += unless(why_no_small_cache, "cache of 4 bits", [{"kv_dtype": name} for name in SMALL_CACHES])

    texts = [text.format(tokens=about.longest // part) for text in POLICIES for part in KEPT_PARTS]
    if about.shared is not None and about.prompt >= LEAST_PROMPT:
        texts += [text.format(tokens=about.prompt // 2) for text in PROMPT_POLICIES]
    short = f"requests of {about.longest} tokens are short: there is little to drop"
    why = given("kv_policy") or (short if about.longest < LEAST_DROPPED else why_no_small_cache)
    policies = unless(why, "policies of the cache", [{"kv_policy": text} for text in texts])

    in_tokens = "without --goodput, users are counted by tokens of cache" if counts_memory else None
    why = "they do not affect a single request" if goal.name == "latency" else in_tokens
    sizes = [{"max_seqs": size} for size in about.sizes if size != about.default_size]
    sizes = unless(given("max_seqs") or why, "batch sizes", sizes)

    names = list(about.drafts)
    if about.num_layers >= LEAST_LAYERS and names == ["ngram"]:  # the model's own first layers
        names += dict.fromkeys(f"layers:{max(round(share * about.num_layers), 1)}" for share in DRAFT_SHARES)
    why = "a draft takes memory from the cache" if counts_memory else None
    drafts = unless(why, "drafts", [{"draft": name} for name in names])

    if about.shared is None:
        why = "its benefit depends on the prompts, and nothing runs"
    elif in_tokens is None and about.shared < LEAST_SHARED:
        share = f"{about.shared:.0%} of the prompts' tokens"
        why = f"on by default, and {share} are in common prefixes (--shared-prefix N)"
    else:
        why = in_tokens
    reuse = unless(given("prefix_cache") or why, "prefix reuse", [{"prefix_cache": False}])

    halves = dict.fromkeys((about.num_layers // 2, about.num_layers))
    why = given("offload", "mesh") or about.why_no_offload
    offload = unless(why, "offload", [{"offload": count} for count in halves if count])
    why = given("mesh", "offload") or (None if about.meshes else "there is one device")
    meshes = unless(why, "meshes", [{"mesh": mesh} for mesh in about.meshes])
    if goal.name == "latency":
        meshes = [mesh for mesh in meshes if "data" not in mesh["mesh"]]  # replicas do not make one request faster
        return [*drafts, *meshes, *weights, *caches, *policies, *reuse, *offload], left_out
    if counts_memory:
        return [*caches, *policies, *weights, *meshes, *offload], left_out
    return [*sizes, *meshes, *weights, *drafts, *reuse, *caches, *policies, *offload], left_out


def mesh_shapes(num_devices: int) -> list[str]:
    """All ways to divide devices into replicas and shards."""
    shapes = []
    for shards in range(num_devices, 0, -1):
        if num_devices > 1 and num_devices % shards == 0:
            sizes = {"data": num_devices // shards, "model": shards}
            shapes.append(",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1))
    return shapes
