"""Results of Transformers for a case of cases.py. Only `make_golden.py` and `test_live.py` import this: it needs
torch."""

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.oracle.cases import MIN_DISTINCT, MIN_MARGIN, NUM_GREEDY, Case, prompt_tokens, weights
from tests.oracle.rope_cases import RopeCase

MAX_SEEDS = 200


def set_up() -> None:
    """One thread, so that sums have one order; no progress bars, and no advice on configs that are odd on purpose."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def build(case: Case, tied: bool, seed: int) -> transformers.PreTrainedModel:
    """The model in float32 with plain attention. NumPy makes the weights: torch's generator may change."""
    options = case.config(tied)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    # Not every class is one of `AutoModelForCausalLM`.
    kind = getattr(transformers, case.architecture)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in stored_tensors(model).items():
            parameter.copy_(torch.from_numpy(weights(name, tuple(parameter.shape), seed, case)))
    return model.eval()


def stored_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint: parameters, and the buffers that are stored."""
    learned = ("e_score_correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(learned)}
    return dict(model.named_parameters()) | buffers


def in_bfloat16(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A copy of the model with bfloat16 weights; its rotation stays in float32, as in a checkpoint of that dtype."""
    other = type(model)._from_config(model.config, dtype=torch.bfloat16, attn_implementation="eager")
    other.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    other.tie_weights()
    return other.eval()


def forward(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """float32 logits [T, V] of int32 tokens [T] in one pass without a cache."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return logits.float().numpy()


def states(model: transformers.PreTrainedModel, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 logits [T, V], and hidden states [L + 1, T, D]: the embedding, after each layer but the last, and after
    the final norm."""
    with torch.no_grad():
        out = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False, output_hidden_states=True)
    return out.logits[0].float().numpy(), torch.stack(out.hidden_states)[:, 0].float().numpy()


def greedy(model: transformers.PreTrainedModel, tokens: list[int]) -> tuple[list[int], float]:
    """The 64 tokens of `generate`, and the smallest lead of a best token over the second best."""
    result = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_GREEDY,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(result.logits).topk(2).values[:, 0]
    output = result.sequences[0, len(tokens) :].tolist()
    if len(output) != NUM_GREEDY:
        raise RuntimeError(f"generate ended after {len(output)} of {NUM_GREEDY} tokens")
    return output, float((best[:, 0] - best[:, 1]).min())


def clear_greedy(case: Case, first_seed: int) -> tuple[int, float, list[tuple[list[int], list[int]]]]:
    """The first seed whose greedy answers neither loop nor hang on a near-tie, the smallest margin, and the answers."""
    for seed in range(first_seed, first_seed + MAX_SEEDS):
        model = build(case, case.ties[0], seed)
        answers, margins = [], []
        for length in case.greedy_lengths:
            tokens = prompt_tokens(seed)[:length].tolist()
            output, margin = greedy(model, tokens)
            if margin <= MIN_MARGIN or len(set(output)) < MIN_DISTINCT:
                break
            answers.append((tokens, output))
            margins.append(margin)
        else:
            return seed, min(margins), answers
    raise RuntimeError(f"{case.name}: no seed in {MAX_SEEDS} gives clear answers")


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
