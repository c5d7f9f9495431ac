"""What Transformers computes for a variant. Only `make_golden.py` and `test_live.py` import this: it needs torch."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from families import MIN_DISTINCT, MIN_MARGIN, NUM_NEW_TOKENS, Variant, greedy_prompts, prompt_tokens, weights
from rope_cases import RopeCase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

MAX_SEEDS = 200


def set_up() -> None:
    """One thread, so that sums have one order; no progress bars, and no advice on configs that are odd on purpose."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@dataclass(frozen=True)
class Reference:
    """A model, the numbers it gives, and the seed of both.

    Attributes:
      prompt: int32 [300]. logits: float32 [300 or fewer, V], of one forward pass over the prompt.
      greedy: prompt and its 64 greedy tokens, for each of the variant's lengths.
      margin: the smallest lead of a best token over the second best on the greedy paths.
    """

    model: transformers.PreTrainedModel
    seed: int
    prompt: np.ndarray
    logits: np.ndarray
    greedy: list[tuple[list[int], list[int]]]
    margin: float

    @property
    def num_distinct(self) -> int:
        """Different tokens in the least varied answer."""
        return min(len(set(output)) for _, output in self.greedy)


def compute(variant: Variant, first_seed: int = 0) -> Reference:
    """The first seed from `first_seed` on whose greedy answers neither loop nor hang on a near-tie."""
    for seed in itertools.count(first_seed):
        if seed == first_seed + MAX_SEEDS:
            raise RuntimeError(f"{variant.name}: no seed in {MAX_SEEDS} gives clear answers")
        model = build(variant, seed)
        prompt = prompt_tokens(seed)
        answers = []
        for tokens in greedy_prompts(variant, prompt):
            output, margin = greedy(model, tokens)
            if margin <= MIN_MARGIN or len(set(output)) < MIN_DISTINCT:
                break
            answers.append((tokens, output, margin))
        else:
            pairs = [(tokens, output) for tokens, output, _ in answers]
            margin = min(margin for *_, margin in answers)
            return Reference(model, seed, prompt, forward(model, prompt[: variant.num_logit_tokens]), pairs, margin)
    raise AssertionError


def build(variant: Variant, seed: int) -> transformers.PreTrainedModel:
    """The model in float32 with plain attention. NumPy makes the weights: torch's generator may change."""
    options = variant.config()
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights(name, tuple(parameter.shape), seed)))
    return model.eval()


def in_bfloat16(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A copy of the model with bfloat16 weights; its rotation stays in float32, as in a checkpoint of that dtype."""
    other = transformers.AutoModelForCausalLM.from_config(
        model.config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    other.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    other.tie_weights()
    return other.eval()


def forward(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """float32 logits [T, V] of int32 tokens [T] in one pass without a cache."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return logits.float().numpy()


def greedy(model: transformers.PreTrainedModel, tokens: list[int]) -> tuple[list[int], float]:
    """The 64 tokens of `generate`, and their smallest margin."""
    result = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(result.logits).topk(2).values[:, 0]
    output = result.sequences[0, len(tokens) :].tolist()
    if len(output) != NUM_NEW_TOKENS:
        raise RuntimeError(f"generate ended after {len(output)} of {NUM_NEW_TOKENS} tokens")
    return output, float((best[:, 0] - best[:, 1]).min())


def rope(case: RopeCase) -> tuple[list[float], float]:
    """Inverse frequencies and the factor on cos and sin, as the model's own module has them after a forward pass."""
    config = transformers.LlamaConfig(
        num_attention_heads=1,
        hidden_size=case.head_dim,
        head_dim=case.head_dim,
        max_position_embeddings=case.max_position_embeddings,
        rope_parameters=dict(case.parameters),
    )
    module = LlamaRotaryEmbedding(config)
    last = (case.sequence_length or 1) - 1
    module(torch.zeros(1), torch.tensor([[0, last]]))
    return module.inv_freq.tolist(), float(module.attention_scaling)
