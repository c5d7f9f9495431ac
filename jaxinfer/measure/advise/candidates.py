"""What a search tries: single changes of a model's options, and those that are left out, with the reason."""

from collections.abc import Iterable, Mapping, Sequence
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
MODEL_FITS = "the model fits: copying layers in each step only takes time"  # why layers are not offloaded


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
    why_no_offload: str | None = MODEL_FITS


def candidates(goal: Goal, about: ModelFacts) -> tuple[list[Arguments], dict[str, str]]:
    """Single changes to try, the most promising first, and those that are not tried, with the reason. Options that the
    user gave are not tried."""
    left_out: dict[str, str] = {}
    counts_cache = goal.name == "users" and not about.has_limits
    why_counted = "without --goodput, users are counted by tokens of cache" if counts_cache else None

    def given(*names: str) -> str | None:
        return next((f"you gave --{name.replace('_', '-')}" for name in names if name in about.given), None)

    def unless(why: str | None, what: str, name: str, values: Iterable[Any]) -> list[Arguments]:
        if why is None:
            return [{name: value} for value in values]
        left_out[what] = why
        return []

    why = given("quantize", "requantize")
    if why is None and about.is_quantized:
        why = "the checkpoint's weights are quantized already"
    weights = unless(why, "weights", "quantize", WEIGHTS)
    if why is None:
        why = None if about.has_calibration else "give a text with --calibration FILE"
        weights += unless(why, "calibrated weights", "method", METHODS)

    why_not_small = None  # a small cache saves memory, and time where reading the cache takes some
    if not about.caches_values:
        why_not_small = "its cache has no values beside keys"
    elif goal.memory is None and not counts_cache and about.longest < LONG:
        why_not_small = (
            f"memory is not limited (--memory GIB), and requests of {about.longest:,} tokens read little cache"
        )
    why = given("kv_dtype")
    caches = unless(why, "cache", "kv_dtype", [name for name in CACHES if about.caches_values or name != "int8"])
    if why is None:
        caches += unless(why_not_small, "cache of 4 bits", "kv_dtype", SMALL_CACHES)

    texts = [text.format(tokens=about.longest // part) for text in POLICIES for part in KEPT_PARTS]
    if about.shared is not None and about.prompt >= LEAST_PROMPT:
        texts += [text.format(tokens=about.prompt // 2) for text in PROMPT_POLICIES]
    why = given("kv_policy")
    if why is None and about.longest < LEAST_DROPPED:
        why = f"requests of {about.longest} tokens are short: there is little to drop"
    policies = unless(why or why_not_small, "policies of the cache", "kv_policy", texts)

    why = "they do not affect a single request" if goal.name == "latency" else why_counted
    sizes = [size for size in about.sizes if size != about.default_size]
    sizes = unless(given("max_seqs") or why, "batch sizes", "max_seqs", sizes)

    why = "a draft takes memory from the cache" if counts_cache else None
    drafts = unless(why, "drafts", "draft", [*about.drafts, *_layer_drafts(about)])

    why = why_counted
    if about.shared is None:
        why = "its benefit depends on the prompts, and nothing runs"
    elif why is None and about.shared < LEAST_SHARED:
        why = f"on by default, and {about.shared:.0%} of the prompts' tokens are in common prefixes (--shared-prefix N)"
    reuse = unless(given("prefix_cache") or why, "prefix reuse", "prefix_cache", [False])

    halves = dict.fromkeys(filter(None, (about.num_layers // 2, about.num_layers)))
    offload = unless(given("offload", "mesh") or about.why_no_offload, "offload", "offload", halves)
    why = given("mesh", "offload") or (None if about.meshes else "there is one device")
    meshes = unless(why, "meshes", "mesh", about.meshes)
    if goal.name == "latency":
        meshes = [one for one in meshes if "data" not in one["mesh"]]  # replicas do not make one request faster
        return [*drafts, *meshes, *weights, *caches, *policies, *reuse, *offload], left_out
    if counts_cache:
        return [*caches, *policies, *weights, *meshes, *offload], left_out
    return [*sizes, *meshes, *weights, *drafts, *reuse, *caches, *policies, *offload], left_out


def _layer_drafts(about: ModelFacts) -> list[str]:
    """Drafts of the model's own first layers, where the user has no draft."""
    if about.num_layers < LEAST_LAYERS or list(about.drafts) != ["ngram"]:
        return []
    counts = dict.fromkeys(max(round(share * about.num_layers), 1) for share in DRAFT_SHARES)
    return [f"layers:{count}" for count in counts]


def mesh_shapes(num_devices: int) -> list[str]:
    """All ways to divide devices into replicas and shards."""
    found = []
    for shards in range(num_devices, 0, -1):
        if num_devices > 1 and num_devices % shards == 0:
            sizes = {"data": num_devices // shards, "model": shards}
            found.append(",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1))
    return found
