"""EasyDeL's eSurge as a peer: the other JAX engine. Runs in an environment of its own, for it pins an older JAX.

Nothing of jaxinfer is imported here.
"""

from pathlib import Path
from typing import Any

from benchmarks.peers.workload import MAX_MODEL_LEN, MAX_SEQS


class EasyDeL:
    compiles_shapes = True

    def __init__(self, folder: Path):
        import easydel
        import jax.numpy as jnp
        from transformers import PreTrainedTokenizerFast

        self._sampling = easydel.SamplingParams
        self._engine: Any = easydel.eSurge(
            model=str(folder),
            tokenizer=_tokenizer(PreTrainedTokenizerFast, folder),
            dtype=jnp.float32,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQS,
            enable_prefix_caching=False,
            # By itself version 0.3.0 takes v3, which fails on a CPU for heads of 64. With v2 it starts, but
            # 12 processor minutes were not enough for a first figure.
            attn_mechanism="ragged_page_attention_v2",
        )

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [
            self._sampling(temperature=0.0, max_tokens=length, min_tokens=length, ignore_eos=True) for length in lengths
        ]
        outputs = self._engine.generate([list(prompt) for prompt in prompts], sampling_params=params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]


def _tokenizer(kind: Any, folder: Path) -> Any:
    """A word for each token id: the engine wants a tokenizer, and requests are ids."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers

    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return kind(tokenizer_object=words, unk_token="t0", eos_token="t1", pad_token="t2")
