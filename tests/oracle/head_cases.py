"""Tiny draft heads of every published kind: their files, written without torch, and what `make_head_golden.py` and the
tests give them.

States of a target are numbered as the speculators library numbers them: state 0 of a position is its embedding, and
state i the output of decoder layer i - 1 before the final norm (i = number of layers is the last). Its configs hold
these numbers, and so do those of the original EAGLE-3, which has them fixed. All other forms hold i - 1, the number of
the layer whose output it is (`HeadCase.taps` has the numbers of states for every form).

What the goldens hold, with `tokens` and the other inputs of `inputs`; T = `NUM_STATES`, V the target's vocabulary, Vd
the draft's, A anchors, B tokens of a block. Every row is valid: no token is missing at the end.

eagle3
  `{seed}.logits` [3, T, Vd], `{seed}.states` [3, T, D]. Step k (from 0) at row i pairs token i + 1 + k with a state:
  for k = 0 with what `fc` makes of the taps of position i, else with `states[k - 1, i]`. It predicts token i + 2 + k,
  and gives `states[k, i]` to step k + 1: before the final norm, or after it with `norm_output`. (In the library's
  training data input_ids are shifted: row i of a batch is token i + 1.) Rotary positions are i + 1 + k. Step k at row i
  sees the keys of step 0 at rows <= i and its own of steps 1 to k at row i: the keys of a chain drafted after row i.
  With a window W, step 0 sees rows > i - W, and so do steps 1 and 2 in the library, whose window does not move.
  `{seed}.position_logits` and `{seed}.position_states` are of a window that moves, as in an engine: step k sees
  positions > i + k - W.
dflash, dflash2, dspark
  `{seed}.logits` [A, B, Vd] of the blocks at `HeadCase.anchors`. The block of anchor p holds token p and then masks, at
  positions p to p + B - 1, and sees the taps of positions < p. Slot j predicts token p + j, slot 0 nothing; with
  `sample_from_anchor` slot j predicts token p + j + 1. With a window W, slots of sliding layers see positions
  >= p - W in the library: the window is counted from the anchor. `{seed}.position_logits` count it from the slot, as
  z-lab's code and engines do: slot j sees positions > p + j - W, and, if it is not causal, < p + j + W. What follows
  is of `logits`.
dflash2, beside these
  `logits` are unary. `{seed}.candidates` and `{seed}.scores` [A, B, K]: the selector's, best unary first, given the
  true token before each slot's own (the anchor for slots 0 and 1, or tokens p + j with `sample_from_anchor`).
  `{seed}.path` [A, B]: the tokens that are chosen greedily, each given the one chosen before it (slot 0 repeats the
  anchor unless `sample_from_anchor`).
dspark, beside these
  `logits` include the Markov head's bias, given the same true tokens. `{seed}.confidence` [A, B] are logits of the
  acceptance probability given them. `{seed}.path` [A, B] as for dflash2, in numbers of the target's vocabulary.
mtp, at the rows `ROWS`, R of them
  `{seed}.chain` [3, R, V], `{seed}.states` [3, R, D]: as for eagle3, where one layer drafts all tokens of a chain. The
  state that enters step 0 is an input, and the one that step k gives to step k + 1 is after the last norm.
  Of Qwen's: `{seed}.rounds` [3, R, V], the library's own pass in training, where step k at row i sees the keys of
  step k at rows <= i, and rotary positions do not move.
  Of DeepSeek's and GLM's, by Transformers: `{seed}.layers` [N, R, V], where N layers draft one token each: layer k
  pairs token i + 1 + k with the output of layer k - 1 at row i, and sees its own keys at rows <= i;
  `{seed}.before_norm` [3, R, V], a chain of the first layer where step k gives on the state before `shared_head.norm`,
  as vLLM does (SGLang and Transformers: after it).
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "golden" / "heads"
SEEDS = (0, 1, 2)
VOCAB, DRAFT_VOCAB, WIDTH, INNER, HEADS, KV_HEADS, TARGET_LAYERS = 96, 40, 32, 48, 4, 2, 8
NUM_STATES, NUM_STEPS = 24, 3
NUM_TOKENS = NUM_STATES + NUM_STEPS
ROWS = (0, 1, 2, 7, 8, 15, 22, 23)
MASK_TOKEN = 93
EAGLE_WINDOW, BLOCK_WINDOW = 8, 6
_TAP_SCALES = (0.5, 1.0, 2.0)
_LAYERS = re.compile(r"layers\.0\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, eq=False)
class HeadCase:
    """One draft head.

    Attributes:
      kind: eagle3, dflash, dflash2, dspark or mtp.
      config: config.json of the head; of `mtp`, of the target, whose files hold the head, unless the form is its own.
      target: config.json of the target.
      form: whose files it has: speculators, original (EAGLE-3 and SGLang), z-lab, deepspec (DeepSeek's DSpark), hub
        (MTP layers in the target's files) or packed (hub, with the experts of a layer in one tensor).
      like: name of the case that has the same weights and golden file in the library's form, if this one has another.
      taps: numbers of the target's states that enter, in the order in which they are concatenated.
      has_embedding, has_head: whether its files have an embedding and a head of their own.
      anchors: positions of the first tokens of blocks.
    """

    name: str
    kind: str
    config: dict[str, Any]
    target: dict[str, Any]
    form: str = "speculators"
    like: str | None = None
    taps: tuple[int, ...] = ()
    has_embedding: bool = False
    has_head: bool = False
    anchors: tuple[int, ...] = ()

    @property
    def path(self) -> Path:
        """The golden file."""
        return FOLDER / f"{self.like or self.name}.safetensors"


@dataclass(frozen=True, eq=False)
class HeadShapes:
    """Names and shapes of tensors, as published in the library's form or on the hub.

    Attributes:
      head: of the head. target: of the target, without the head.
    """

    head: dict[str, list[int]]
    target: dict[str, list[int]]


@cache
def golden(case: HeadCase) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata of the golden file, and its tensors."""
    with safe_open(case.path, "numpy") as file:
        return json.loads(file.metadata()["made"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def shapes(case: HeadCase) -> HeadShapes:
    """The names and shapes that the golden file holds."""
    made, _ = golden(case)
    return HeadShapes(made["head"], made["target"])


def inputs(case: HeadCase, seed: int) -> dict[str, np.ndarray]:
    """`tokens` int32 [T + 3], and float32 `taps` [T, taps * D] or, of MTP, `states` [T, D].

    The taps are of different sizes, as those of a target are.
    """
    random = np.random.default_rng([seed, zlib.crc32(b"inputs")])
    tokens = random.integers(0, MASK_TOKEN, NUM_TOKENS, np.int32)
    if case.kind == "mtp":
        return {"tokens": tokens, "states": random.standard_normal((NUM_STATES, WIDTH), np.float32)}
    taps = [
        np.float32(scale) * random.standard_normal((NUM_STATES, WIDTH), np.float32)
        for scale in _TAP_SCALES[: len(case.taps)]
    ]
    return {"tokens": tokens, "taps": np.concatenate(taps, axis=1)}


def write_checkpoint(folder: Path, case: HeadCase, seed: int, made: HeadShapes | None = None) -> Path:
    """Writes the head as it is published: config.json and model.safetensors. Returns the folder.

    An MTP head in the form of the hub is part of its target, which is written too. `made`: the shapes, if there is no
    golden file yet that holds them; so below.
    """
    tensors = _FORMS[case.form](head_tensors(case, seed, made), target_tensors(case, seed, made))
    return _write(folder, case.config, tensors)


def write_target(folder: Path, case: HeadCase, seed: int, made: HeadShapes | None = None) -> Path:
    """Writes the whole target model. Returns the folder."""
    return _write(folder, case.target, target_tensors(case, seed, made))


def head_tensors(case: HeadCase, seed: int, made: HeadShapes | None = None) -> dict[str, np.ndarray]:
    """All tensors of a head, under the library's names or, of MTP, the hub's."""
    made = made or shapes(case)
    return {name: _values(name, tuple(shape), seed, case) for name, shape in made.head.items()}


def target_tensors(case: HeadCase, seed: int, made: HeadShapes | None = None) -> dict[str, np.ndarray]:
    """All tensors of a target, under the hub's names."""
    made = made or shapes(case)
    return {name: _values(name, tuple(shape), seed, case) for name, shape in made.target.items()}


def embedding_and_head(case: HeadCase, seed: int, made: HeadShapes | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The embedding [V, D] and the head [Vd or V, D] that the draft uses: its own, or else the target's."""
    made = made or shapes(case)
    own, theirs = head_tensors(case, seed, made), target_tensors(case, seed, made)
    [embedding] = [name for name in theirs if name.endswith("embed_tokens.weight")]
    return own.get("embed_tokens.weight", theirs[embedding]), own.get("lm_head.weight", theirs["lm_head.weight"])


def kept_tokens(seed: int) -> np.ndarray:
    """int64 [Vd], ascending: the tokens of the target's vocabulary that the draft's has."""
    random = np.random.default_rng([seed, zlib.crc32(b"d2t")])
    return np.sort(random.choice(VOCAB, DRAFT_VOCAB, replace=False)).astype(np.int64)


def _values(name: str, shape: tuple[int, ...], seed: int, case: HeadCase) -> np.ndarray:
    """Values of a tensor, a function of its name: large enough for each to show in the logits, which are not flat."""
    if name == "d2t":
        return kept_tokens(seed) - np.arange(DRAFT_VOCAB)
    if name == "t2d":
        return np.isin(np.arange(VOCAB), kept_tokens(seed))
    # DeepSeek's files repeat the target's tensors in each MTP layer.
    if case.kind == "mtp" and name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
        name = "model.embed_tokens.weight" if name.endswith("embed_tokens.weight") else "lm_head.weight"
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if name.endswith("base_kernel"):
        return np.float32(0.3) * noise + np.array([1, *[0] * (shape[1] - 1)], np.float32)[:, None]
    if len(shape) == 1:
        is_zero_centred = case.kind == "mtp" and _model_type(case).startswith("qwen3_") and "linear_attn" not in name
        centre = 1 if "norm" in name and not is_zero_centred else 0
        # A router's correction is small: implementations differ where a corrected score is negative.
        is_small = "norm" in name or name.endswith("e_score_correction_bias")
        return np.float32(centre) + np.float32(0.1 if is_small else 0.3) * noise
    if name.endswith(("embed_tokens.weight", "codebook", "markov_w1.weight")):
        return np.float32(0.7) * noise
    # Kernels of convolutions change little in trained heads; large ones add up to states that float32 rounds coarsely.
    factor = 0.3 if name.endswith("kernel_projection.weight") else 1.2
    return np.float32(factor * shape[-1] ** -0.5) * noise


def _model_type(case: HeadCase) -> str:
    return case.target.get("text_config", case.target)["model_type"]


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


Tensors = dict[str, np.ndarray]


def _as_original(head: Tensors, target: Tensors) -> Tensors:
    return {_LAYERS.sub("midlayer.", name): tensor for name, tensor in head.items()}


def _as_deepspec(head: Tensors, target: Tensors) -> Tensors:
    copies = {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}
    return head | copies


def _as_packed(head: Tensors, target: Tensors) -> Tensors:
    packed = {name: tensor for name, tensor in (target | head).items() if not _EXPERT.match(name)}
    found = [match for match in map(_EXPERT.match, target | head) if match]
    for prefix in {match[1] for match in found}:
        numbers = range(1 + max(int(match[2]) for match in found if match[1] == prefix))
        gate, up, down = (
            np.stack([(target | head)[f"{prefix}.{number}.{part}_proj.weight"] for number in numbers])
            for part in ("gate", "up", "down")
        )
        packed |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    return packed


_MTP_NAMES = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}


def _as_speculators(head: Tensors, target: Tensors) -> Tensors:
    def renamed(name: str) -> str:
        prefix = next((prefix for prefix in _MTP_NAMES if name.startswith(prefix)), "")
        return _MTP_NAMES.get(prefix, "") + name.removeprefix(prefix)

    return {renamed(name): tensor for name, tensor in head.items()}


_FORMS: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "speculators": _as_speculators,
    "original": _as_original,
    "z-lab": lambda head, target: head,
    "deepspec": _as_deepspec,
    "hub": lambda head, target: target | head,
    "packed": _as_packed,
}

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_DENSE = {**_COMMON, "intermediate_size": INNER}
_TARGETS = {
    kind: {
        "architectures": [architecture],
        "model_type": kind,
        **_DENSE,
        "num_hidden_layers": TARGET_LAYERS,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "torch_dtype": "float32",
    }
    for kind, architecture in (("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM"))
}


def _layer(kind: str, num_layers: int = 1, **more: Any) -> dict[str, Any]:
    """Config of a head's layers: its epsilon, rotation and width of heads are not the target's."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {"num_hidden_layers": num_layers, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    return {"model_type": kind, **_DENSE, **sizes, **more}


def _window(window: int, *kinds: str) -> dict[str, Any]:
    """Fields of layers of which some have a window."""
    types = [f"{kind}_attention" for kind in kinds]
    return {"layer_types": types, "sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _speculators(
    kind: str, architecture: str, layer: dict[str, Any], targets: list[str], num_drafts: int = NUM_STEPS, **more: Any
) -> dict[str, Any]:
    """config.json of the speculators library."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_drafts, "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "tiny/target", "architectures": targets},
        },
        "transformer_layer_config": layer,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **more,
    }


def _eagle3(
    name: str,
    layer: dict[str, Any],
    taps: tuple[int, ...] = (2, 4, 5),
    target: str = "llama",
    draft_vocab: int = DRAFT_VOCAB,
    has_embedding: bool = True,
    **more: Any,
) -> HeadCase:
    # Where the config holds none, the library's defaults are meant: 2, half and all but 3 of the layers.
    flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    fields = {"draft_vocab_size": draft_vocab, "eagle_aux_hidden_state_layer_ids": list(taps), **flags, **more}
    architectures = _TARGETS[target]["architectures"]
    config = _speculators("eagle3", "Eagle3DraftModel", layer, architectures, embed_requires_grad=False, **fields)
    return HeadCase(name, "eagle3", config, _TARGETS[target], taps=taps, has_embedding=has_embedding, has_head=True)


def _original(name: str, like: HeadCase, **more: Any) -> HeadCase:
    """The flat config of the original EAGLE-3, which SGLang and SpecForge read and write."""
    layer = dict(like.config["transformer_layer_config"])
    rope = layer.pop("rope_parameters")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "draft_vocab_size": like.config["draft_vocab_size"],
        "torch_dtype": "float32",
        **more,
    }
    return _in_form("original", name, like, config)


def _in_form(form: str, name: str, like: HeadCase, config: dict[str, Any]) -> HeadCase:
    return HeadCase(
        name,
        like.kind,
        config,
        like.target,
        form,
        like.name,
        like.taps,
        like.has_embedding,
        like.has_head,
        like.anchors,
    )


_EAGLE3_LLAMA = _eagle3("eagle3_llama", _layer("llama"), has_embedding=False, eagle_aux_hidden_state_layer_ids=None)
_EAGLE3_FULL = _eagle3("eagle3_llama_full", _layer("llama"), (1, 4, 8), draft_vocab=VOCAB)
_NESTED_IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7], "use_aux_hidden_state": True}}
_EAGLE3_CASES = [
    _EAGLE3_LLAMA,
    _EAGLE3_FULL,
    _eagle3("eagle3_qwen3", _layer("qwen3"), (0, 4, 7), "qwen3"),
    _eagle3("eagle3_norms", _layer("llama"), fc_norm=True, norm_output=True),
    _eagle3("eagle3_norm_before_fc", _layer("llama"), norm_before_fc=True),
    _eagle3("eagle3_norm_before_residual", _layer("llama"), norm_before_residual=True),
    _eagle3("eagle3_two_layers", _layer("llama", 2)),
    _eagle3("eagle3_window", _layer("qwen3", 2, **_window(EAGLE_WINDOW, "sliding", "full")), target="qwen3"),
    _original("eagle3_llama_original", _EAGLE3_LLAMA),
    _original("eagle3_llama_full_original", _EAGLE3_FULL, **_NESTED_IDS),
]


def _blocks(
    name: str,
    kind: str,
    layer: dict[str, Any],
    block: int = 8,
    taps: tuple[int, ...] = (2, 4, 6),
    draft_vocab: int = VOCAB,
    **more: Any,
) -> HeadCase:
    """A head that drafts a block at once."""
    fields = {
        "draft_vocab_size": draft_vocab,
        "block_size": block,
        "aux_hidden_state_layer_ids": list(taps),
        "mask_token_id": MASK_TOKEN,
        "sliding_window_non_causal": kind == "dflash2",
        "sample_from_anchor": kind == "dspark",
    }
    architecture = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}[kind]
    targets = _TARGETS["qwen3"]["architectures"]
    fields |= more
    num_drafts = block if fields["sample_from_anchor"] else block - 1
    config = _speculators(kind, architecture, layer, targets, num_drafts, **fields)
    anchors = (1, 5, 9, 13, 16) if block == 8 else (1, 4, 9, 14, 20)
    return HeadCase(name, kind, config, _TARGETS["qwen3"], taps=taps, has_head=draft_vocab != VOCAB, anchors=anchors)


def _flat_blocks(architecture: str, like: HeadCase, **more: Any) -> dict[str, Any]:
    """The flat config of a head that drafts blocks, as z-lab and DeepSeek write it."""
    layer = dict(like.config["transformer_layer_config"])
    return {"architectures": [architecture], **layer, "num_target_layers": TARGET_LAYERS, "dtype": "float32", **more}


def _output_layers(case: HeadCase) -> list[int]:
    """Numbers of the layers whose outputs the taps are."""
    return [tap - 1 for tap in case.taps]


_TWO_FULL = _layer("qwen3", 2, layer_types=["full_attention"] * 2, sliding_window=None, use_sliding_window=False)
_WINDOWS = _layer("qwen3", 2, **_window(BLOCK_WINDOW, "sliding", "full"))
_DFLASH = _blocks("dflash", "dflash", _TWO_FULL)
_DFLASH_WINDOW = _blocks("dflash_window", "dflash", _WINDOWS)
_DFLASH_CASES = [
    _DFLASH,
    _DFLASH_WINDOW,
    _blocks("dflash_window_both_ways", "dflash", _WINDOWS, sliding_window_non_causal=True),
    _blocks("dflash_reduced", "dflash", _TWO_FULL, draft_vocab=DRAFT_VOCAB, taps=(0, 4, 8)),
    _blocks("dflash_from_anchor", "dflash", _TWO_FULL, 4, sample_from_anchor=True),
    _in_form(
        "z-lab",
        "dflash_zlab",
        _DFLASH,
        _flat_blocks(
            "DFlashDraftModel",
            _DFLASH,
            block_size=8,
            dflash_config={"mask_token_id": MASK_TOKEN, "target_layer_ids": _output_layers(_DFLASH)},
        ),
    ),
    # Without is_causal, z-lab's sliding layers are causal and its full ones are not. Their window is that of
    # `position_logits`.
    _in_form(
        "z-lab",
        "dflash_zlab_window",
        _DFLASH_WINDOW,
        _flat_blocks(
            "DFlashDraftModel",
            _DFLASH_WINDOW,
            dflash_config={
                "block_size": 8,
                "mask_token_id": MASK_TOKEN,
                "target_layer_ids": _output_layers(_DFLASH_WINDOW),
            },
        ),
    ),
]
_CONV = {"conv_kernel_size": 2, "conv_group_size": 4}
_SELECTOR = {"selector_rank": 8, "selector_top_k": 4}
_DFLASH2 = _blocks("dflash2", "dflash2", _TWO_FULL, **_CONV, **_SELECTOR)
_DFLASH2_CASES = [
    _DFLASH2,
    _blocks(
        "dflash2_from_anchor",
        "dflash2",
        _WINDOWS,
        4,
        sample_from_anchor=True,
        **{**_CONV, "conv_kernel_size": 3},
        **_SELECTOR,
    ),
    _in_form(
        "z-lab",
        "dflash2_zlab",
        _DFLASH2,
        _flat_blocks(
            "DFlash2DraftModel",
            _DFLASH2,
            is_causal=False,
            dflash_config={
                "block_size": 8,
                "mask_token_id": MASK_TOKEN,
                "target_layer_ids": _output_layers(_DFLASH2),
                **_CONV,
                **_SELECTOR,
            },
        ),
    ),
]


def _markov(kind: str, with_markov: bool) -> dict[str, Any]:
    return {
        "markov_rank": 8,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": with_markov,
    }


_DSPARK = {
    kind: _blocks(f"dspark_{kind}", "dspark", _TWO_FULL, 4, **_markov(kind, True))
    for kind in ("vanilla", "gated", "rnn")
}
_DSPARK_CASES = [
    *_DSPARK.values(),
    # Of a block of 1 + N tokens, as the library's DFlash, and without the Markov embedding in the confidence.
    *(
        _blocks(
            f"dspark_{kind}_reduced",
            "dspark",
            _TWO_FULL,
            draft_vocab=DRAFT_VOCAB,
            sample_from_anchor=False,
            **_markov(kind, False),
        )
        for kind in _DSPARK
    ),
    _in_form(
        "deepspec",
        "dspark_deepspec",
        _DSPARK["vanilla"],
        _flat_blocks(
            "Qwen3DSparkModel",
            _DSPARK["vanilla"],
            block_size=4,
            mask_token_id=MASK_TOKEN,
            target_layer_ids=_output_layers(_DSPARK["vanilla"]),
            num_anchors=512,
            **_markov("vanilla", True),
        ),
    ),
]

_DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
_MROPE = {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
_PARTIAL = {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"}
_LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": HEADS,
}
_SCORED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}


def _mtp(name: str, config: dict[str, Any]) -> HeadCase:
    """MTP layers that their target's files hold: the config is the target's."""
    text = config.get("text_config", config)
    return HeadCase(name, "mtp", config, config, "hub", taps=(text["num_hidden_layers"],))


def _qwen3_5(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    """A model of text and images, as Qwen3.5's files are: the text part and nothing of the other."""
    text = {
        **_COMMON,
        **_DELTA,
        "model_type": f"{kind}_text",
        "partial_rotary_factor": 0.5,
        "rope_parameters": {**_PARTIAL, **_MROPE},
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "dtype": "float32",
        **more,
    }
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": False,
    }


_QWEN3_5 = _mtp("mtp_qwen3_5", _qwen3_5("qwen3_5", "Qwen3_5ForConditionalGeneration", intermediate_size=INNER))
_QWEN3_5_MOE = _mtp("mtp_qwen3_5_moe", _qwen3_5("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", **_EXPERTS))


def _speculators_mtp(case: HeadCase) -> dict[str, Any]:
    """config.json of the library for an MTP head in a folder of its own."""
    config = _speculators("mtp", "MTPDraftModel", case.config["text_config"], case.config["architectures"])
    return {**config, "num_nextn_predict_layers": 1}


def _deepseek(name: str, num_mtp_layers: int) -> HeadCase:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_DENSE,
        **_LATENT,
        **_SCORED_EXPERTS,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": num_mtp_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    return _mtp(name, config)


_MTP_CASES = [
    _mtp(
        "mtp_qwen3_next",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **_DENSE,
            **_DELTA,
            **_EXPERTS,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "torch_dtype": "float32",
        },
    ),
    _QWEN3_5,
    _QWEN3_5_MOE,
    _in_form("packed", "mtp_qwen3_5_moe_packed", _QWEN3_5_MOE, _QWEN3_5_MOE.config),
    _in_form("speculators", "mtp_qwen3_5_speculators", _QWEN3_5, _speculators_mtp(_QWEN3_5)),
    _deepseek("mtp_deepseek_v3", 1),
    _deepseek("mtp_deepseek_v3_two", 2),
    _mtp(
        "mtp_glm4_moe",
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **_DENSE,
            **_SCORED_EXPERTS,
            "attention_bias": True,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
            "torch_dtype": "float32",
        },
    ),
]
HEAD_CASES: list[HeadCase] = [*_EAGLE3_CASES, *_DFLASH_CASES, *_DFLASH2_CASES, *_DSPARK_CASES, *_MTP_CASES]
