"""Faults in drafts with another tokenizer: no answer changes, but drafts are a waste."""

from tests.faults.fault import Fault

HOST, MODULES = "jaxinfer/speculative/vocabularies.py", "jaxinfer/models/modules.py"
TABLES = "tests/speculative/test_vocabularies.py::"
BYTES = TABLES + "test_any_two_vocabularies"
MODEL = TABLES + "test_a_model_reads_and_predicts_by_tables"
ENGINE = "tests/engine/test_vocabularies.py::test_answers_are_those_of_plain_decoding"

FAULTS = (
    Fault(
        "vocabularies/a-map-off-by-one",
        HOST,
        "index[token] = ours.get(text, draft.size)",
        "index[token] = (ours.get(text, draft.size) + 1) % (draft.size + 1)",
        (BYTES,),
        "every draft is the token after the one that the draft model chose",
    ),
    Fault(
        "vocabularies/special-tokens-have-no-counterpart",
        HOST,
        "        if token in special:",
        "        if token in special and False:",
        (TABLES + "test_special_tokens",),
        "the draft reads the beginning and the turns of a chat as letters",
    ),
    Fault(
        "vocabularies/ends-of-turns-are-letters",
        HOST,
        "    pairs += [(token, ours.eos_token_id) for token in target.eos_token_ids]\n",
        "",
        (TABLES + "test_ends_of_answers_are_read_as_the_end",),
        "the draft reads the ends of turns as letters",
    ),
    Fault(
        "vocabularies/pieces-reversed",
        HOST,
        "            tokens.append(ids[text[start:end]])",
        "            tokens.insert(0, ids[text[start:end]])",
        (BYTES,),
        "long words are cut to their first pieces, and read backwards",
    ),
    Fault(
        "vocabularies/shortest-tokens-first",
        HOST,
        "end = min(len(text), start + longest)",
        "end = min(len(text), start + 1)",
        (BYTES,),
        "the draft reads every word as letters",
    ),
    Fault(
        "vocabularies/unmapped-tokens-are-drafted",
        "jaxinfer/models/basic.py",
        "constant_values=-jnp.inf)\n    return jnp.take(padded, index",
        "constant_values=0.0)\n    return jnp.take(padded, index",
        (MODEL,),
        "tokens that the draft cannot predict are drafted",
    ),
    Fault(
        "vocabularies/two-tokens-share-a-probability",
        HOST,
        "        if text and (text not in ids or _is_named_by_byte(tokenizer, ids[text], text)):",
        "        if text and text not in ids:",
        (TABLES + "test_tokens_of_single_bytes",),
        "letters are drafted as the tokens of single bytes, which no text has: none is accepted",
    ),
    Fault(
        "vocabularies/one-token-of-the-draft-is-drafted-as-two",
        HOST,
        "        if its not in index:",
        "        if True:",
        (TABLES + "test_ends_of_answers_are_read_as_the_end",),
        "the end of an answer is drafted as the token of the lower number",
    ),
    Fault(
        "vocabularies/padding-is-a-piece",
        MODULES,
        "count = jnp.maximum(jnp.sum(is_piece, axis=-1, keepdims=True), 1)",
        "count = jnp.full((*tokens.shape, 1), token_map.num_pieces)",
        (MODEL, ENGINE),
        "embeddings are a quarter of what the draft was trained with",
    ),
    Fault(
        "vocabularies/only-the-first-piece-is-read",
        MODULES,
        "is_piece = pieces < self.config.vocab_size",
        "is_piece = (pieces < self.config.vocab_size) & (np.arange(token_map.num_pieces) == 0)",
        (MODEL,),
        "of a word that the draft lacks it reads the first letters",
    ),
    Fault(
        "vocabularies/a-text-has-no-beginning",
        MODULES,
        "jnp.where((positions == 0)[..., None], first, pieces)",
        "pieces",
        (MODEL,),
        "a draft that was trained with a token before every text gets none: next to nothing is accepted",
    ),
    Fault(
        "vocabularies/kept-tables-of-another-pair",
        HOST,
        'key = key_of("tables of tokens", repr(models), str(MAX_PIECES)',
        'key = key_of("tables of tokens", str(MAX_PIECES)',
        (TABLES + "test_tables_of_large_vocabularies_are_kept",),
        "a second draft has the tokens of the first",
    ),
    Fault(
        "vocabularies/unlike-tokenizers-are-let-pass",
        HOST,
        "if share < LEAST_SHARE:",
        "if share < 0:",
        (TABLES + "test_a_draft_with_next_to_no_common_token_is_refused",),
        "a draft that can draft nothing takes memory and time",
    ),
)
