"""Two small tokenizers of other kinds, and a model whose tokens are renumbered for the other one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, init_params
from jaxinfer.speculative.vocabularies import ModelTokens, TokenTables
from jaxinfer.text import Tokenizer
from tests.text.conftest import add_markers, byte_level, gemma, wrap
from tests.tiny import TINY


def byte_level_tokenizer() -> Tokenizer:
    """A tokenizer of GPT-2's kind, with special tokens for chats; it puts nothing before a text."""
    backend = byte_level()
    add_markers(backend)
    return wrap(backend, special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer of Gemma's kind: `▁` for spaces, tokens for single bytes, runs of newlines."""
    return wrap(gemma(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def tokens_of(name: str, tokenizer: Tokenizer, num_unused: int = 3) -> ModelTokens:
    """The tokens of a model that has some rows more."""
    size = max(tokenizer.tokens_by_id()) + 1 + num_unused
    assert tokenizer.eos_token_id is not None
    return ModelTokens(name, tokenizer, size, (tokenizer.eos_token_id,))


def tiny_model(tokens: ModelTokens, seed: int = 5) -> tuple[ModelConfig, Params, Tokenizer]:
    config = replace(TINY, vocab_size=tokens.size)
    params = init_params(config, jax.random.key(seed))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)
    return config, params, tokens.tokenizer


def renumbered(model: tuple[ModelConfig, Params, Tokenizer], tables: TokenTables, tokenizer: Tokenizer):
    """A model with the tokens of a draft: those that `tables` say are a target token have its embedding and logits, the
    others random ones."""
    config, params, _ = model
    config = replace(config, vocab_size=tables.size)
    noise = init_params(config, jax.random.key(11))
    embed, head = np.array(noise["embed"]), np.array(noise["lm_head"])
    tokens = np.flatnonzero(tables.index < tables.size)
    embed[tables.index[tokens]] = np.asarray(params["embed"])[tokens]
    head[:, tables.index[tokens]] = np.asarray(params["lm_head"])[:, tokens]
    return config, {**params, "embed": jnp.asarray(embed), "lm_head": jnp.asarray(head)}, tokenizer
