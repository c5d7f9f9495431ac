"""Faults in trained heads that draft: few change an answer, most make every round a waste."""

from tests.faults.fault import Fault

ORACLE = "tests/speculative/test_heads.py::test_drafts_scores_and_pages_follow_from_tokens_and_states"
SETTINGS = "tests/speculative/test_heads.py::test_what_a_draft_says_of_its_head"
CHAINS = "tests/models/test_draft_head.py::test_chains_of_pairs"
BLOCKS = "tests/models/test_draft_head.py::test_blocks"
FILES = "tests/checkpoints_convert/huggingface/test_heads.py::"
PAGES = "tests/engine/test_head_pages.py::"
ROUNDS, HEAD = "jaxinfer/speculative/heads.py", "jaxinfer/models/draft_head.py"
CONFIG = "jaxinfer/models/draft_head_config.py"

TAPS = (
    Fault(
        "heads/taps-leave-the-layer-they-should-enter",
        CONFIG,
        'else f"layers.{layer - 1}.residual"',
        'else f"layers.{min(layer, num_layers - 1)}.residual"',
        (SETTINGS,),
        "a head reads states of another layer than it was trained on: next to no draft is accepted",
    ),
    Fault(
        "heads/files-name-layers-and-not-states",
        "checkpoints_convert/huggingface/families_heads.py",
        "[layer + 1 if type(layer) is int else layer",
        "[layer if type(layer) is int else layer",
        (FILES + "test_heads_are_told_by_their_files",),
        "DFlash heads read the states before each layer that they were trained on",
    ),
    Fault(
        "heads/taps-in-another-order",
        ROUNDS,
        "[rows.taps[name] for name in self.taps]",
        "[rows.taps[name] for name in reversed(self.taps)]",
        (ORACLE + "[eagle3 wide]",),
        "the projection of tapped states reads each layer's state with another layer's weights",
    ),
    Fault(
        "heads/tapped-states-are-not-normed",
        HEAD,
        "stacked = ends.tap_norms(stacked)",
        "stacked = stacked",
        (CHAINS + "[eagle3_norms-0]",),
        "heads with a norm of each state accept less",
    ),
    Fault(
        "heads/context-is-not-normed",
        HEAD,
        "return states if ends.context_norm is None else ends.context_norm(states)",
        "return states",
        (BLOCKS + "[dflash-0]",),
        "the context of DFlash has other keys than in training",
    ),
    Fault(
        "heads/mtp-reads-states-before-the-last-norm",
        CONFIG,
        'return ("final_norm",)',
        'return (f"layers.{num_layers - 1}.residual",)',
        (SETTINGS,),
        "multi-token prediction reads states of other sizes than in training",
    ),
)

PAIRS = (
    Fault(
        "heads/pairs-with-their-own-token",
        ROUNDS,
        "self.head.store_pairs(rows.tokens, before",
        "self.head.store_pairs(jnp.roll(rows.tokens, 1), before",
        (ORACLE + "[mtp]",),
        "a state is paired with its own token instead of the one after it",
    ),
    Fault(
        "heads/a-missing-state-is-taken-from-another-sequence",
        ROUNDS,
        "lacks = ((first == rows.num_found) | (end != first)).astype(jnp.int32) * (rows.lengths > 0)",
        "lacks = jnp.zeros_like(first)",
        (ORACLE + "[eagle3 wide]",),
        "a prompt that begins like an earlier one overwrites the last pair of the page that both share",
    ),
    Fault(
        "heads/an-earlier-sequence-s-state-is-taken-for-the-prefix-s",
        ROUNDS,
        "((first == rows.num_found) | (end != first))",
        "(end != first)",
        (ORACLE + "[eagle3 wide]",),
        "the last pair of a prefix has the state of the request that had the slot before",
    ),
    Fault(
        "heads/the-last-page-of-a-prefix-is-found-whatever-follows",
        "jaxinfer/speculative/drafts.py",
        "return 0 if self.head.is_block else 1",
        "return 0",
        (PAGES + "test_a_page_is_found_where_the_token_after_it_is_the_same",),
        "after a prefix hit the last pair of the page is of another text, and fewer drafts are accepted",
    ),
    Fault(
        "heads/the-newest-state-is-not-carried",
        ROUNDS,
        "STATE: last, END: first + rows.lengths}",
        "STATE: 0 * last, END: first + rows.lengths}",
        (ORACLE + "[eagle3 wide]",),
        "the first draft of each round follows from nothing",
    ),
    Fault(
        "heads/pairs-of-each-pass-begin-one-late",
        ROUNDS,
        "END: first + rows.lengths}",
        "END: first + lengths}",
        (ORACLE + "[mtp]",),
        "pairs at the borders of chunks and rounds are missing",
    ),
    Fault(
        "heads/accepted-drafts-keep-the-head-s-own-states",
        "jaxinfer/engine/programs/speculative.py",
        "draft_cache = self.proposer.observe(draft_cache, seen)",
        "draft_cache = self.proposer.observe(draft_cache, seen._replace(lengths=0 * seen.lengths))",
        (PAGES + "test_pages_follow_from_the_tokens",),
        "pages hold what was guessed and not what the target computed: acceptance falls with each round",
    ),
    Fault(
        "heads/the-first-layer-adds-what-was-not-normed",
        HEAD,
        "(read if self.adds_normed else states)",
        "states",
        (CHAINS + "[eagle3_norm_before_residual-0]",),
        "EAGLE-3 heads of the speculators library accept less",
    ),
    Fault(
        "heads/mtp-s-token-is-not-normed",
        HEAD,
        "[ends.token_norm(x), ends.state_norm(states)]",
        "[x, ends.state_norm(states)]",
        (CHAINS + "[mtp_qwen3_5_speculators-0]",),
        "multi-token prediction reads embeddings of other sizes than in training",
    ),
    Fault(
        "heads/mtp-goes-on-with-states-before-the-norm",
        HEAD,
        "normed if self.head.returns_normed else x",
        "x",
        (CHAINS + "[mtp_qwen3_5_speculators-0]",),
        "the second and later drafts of multi-token prediction are not accepted",
    ),
)

IN_BLOCKS = (
    Fault(
        "heads/blocks-are-causal-in-every-layer",
        ROUNDS,
        "causal if layer in head.causal_layers else mutual for",
        "causal for",
        (ORACLE + "[dflash]",),
        "masks of a block do not see those after them",
    ),
    Fault(
        "heads/blocks-are-mutual-in-every-layer",
        ROUNDS,
        "causal if layer in head.causal_layers else mutual for",
        "mutual for",
        (ORACLE + "[dflash]",),
        "masks of a block see those after them in layers that were trained without",
    ),
    Fault(
        "heads/files-without-windows-are-causal",
        "checkpoints_convert/huggingface/families_heads.py",
        'kind == "dflash2") else "windows"',
        'kind == "dflash2") else "all"',
        (FILES + "test_layers_in_which_blocks_are_causal",),
        "DFlash heads draft as if they were trained one token after another",
    ),
    Fault(
        "heads/the-window-of-a-mutual-block-ends-at-its-last-token",
        ROUNDS,
        "chosen is causal else window + size",
        "chosen is causal else window",
        (ORACLE + "[dflash mutual window]",),
        "blocks see less of the context than in training",
    ),
    Fault(
        "heads/the-root-is-the-last-token-of-a-block",
        ROUNDS,
        "head.mask_token, jnp.int32).at[:, 0].set(root)",
        "head.mask_token, jnp.int32).at[:, -1].set(root)",
        (ORACLE + "[dflash]",),
        "a mask is where the newest token should be",
    ),
    Fault(
        "heads/another-token-for-a-mask",
        ROUNDS,
        "jnp.full((count, size), head.mask_token, jnp.int32)",
        "jnp.full((count, size), 0, jnp.int32)",
        (ORACLE + "[dflash]",),
        "a block is filled with a token of the vocabulary",
    ),
    Fault(
        "heads/short-blocks-see-masks-that-are-not-theirs",
        ROUNDS,
        "rows.num_nodes - head.drafts_at_root, 0)",
        "size, 0)",
        (ORACLE + "[dflash]",),
        "near the end of an answer a block writes keys beyond the request's pages",
    ),
    Fault(
        "heads/a-convolution-reads-the-future",
        HEAD,
        "((0, 0), (tap, 0), (0, 0)))[:, :length]",
        "((0, 0), (0, tap), (0, 0)))[:, tap:]",
        (BLOCKS + "[dflash2-0]",),
        "DFlash 2 reads the token after each one instead of the one before",
    ),
    Fault(
        "heads/a-convolution-has-the-next-group-s-kernel",
        HEAD,
        "jnp.repeat(kernels[..., tap, :], self.group, axis=-1)",
        "jnp.roll(jnp.repeat(kernels[..., tap, :], self.group, axis=-1), self.group, axis=-1)",
        (BLOCKS + "[dflash2-0]",),
        "channels of DFlash 2 are mixed with weights of others",
    ),
    Fault(
        "heads/a-selector-adds-nothing",
        HEAD,
        "best + scores.astype(logits.dtype)",
        "best",
        (BLOCKS + "[dflash2-0]",),
        "DFlash 2 drafts the best token of each place, whatever was drafted before it",
    ),
    Fault(
        "heads/a-selector-reads-the-root",
        ROUNDS,
        "head.selector(own_logits, own_hidden, token)",
        "head.selector(own_logits, own_hidden, root)",
        (ORACLE + "[dflash2]",),
        "the second and later drafts of DFlash 2 follow from the newest token instead of the draft before",
    ),
    Fault(
        "heads/a-markov-head-reads-the-token-before-the-last",
        ROUNDS,
        "markov.embedding(token, dtype)",
        "markov.embedding(chosen[0][:, jnp.maximum(number - 1, 0)], dtype)",
        (ORACLE + "[dspark rnn]",),
        "the bias of DSpark follows from the token before the last",
    ),
    Fault(
        "heads/a-gate-is-always-open",
        HEAD,
        "self.out_proj(gate * before)",
        "self.out_proj(before)",
        (BLOCKS + "[dspark_gated-0]",),
        "DSpark's bias does not depend on the place in the block",
    ),
    Fault(
        "heads/a-recurrent-head-remembers-nothing",
        HEAD,
        "return gate * state + (1 - gate) * jnp.tanh(candidate), ",
        "return state, ",
        (BLOCKS + "[dspark_rnn-0]",),
        "DSpark's bias follows from one token instead of all of the block",
    ),
    Fault(
        "heads/a-recurrent-head-s-memory-is-not-carried",
        ROUNDS,
        "                memory, bias = markov(",
        "                _, bias = markov(",
        (ORACLE + "[dspark rnn]",),
        "each draft of DSpark follows from what was kept of the root",
    ),
)

VOCABULARIES = (
    Fault(
        "heads/d2t-is-an-id",
        "checkpoints_convert/huggingface/checkpoint.py",
        "tokens = np.arange(count) + offsets",
        "tokens = offsets",
        (FILES + "test_a_smaller_vocabulary_is_read_from_differences",),
        "heads with a smaller vocabulary draft other tokens than they mean, or do not open",
    ),
    Fault(
        "heads/tokens-outside-a-vocabulary-are-drafted",
        HEAD,
        "NOT_DRAFTED = -jnp.inf",
        "NOT_DRAFTED = 0.0",
        ("tests/speculative/test_heads.py::test_only_tokens_of_its_vocabulary_are_drafted",),
        "a head drafts tokens that it knows nothing of",
    ),
    Fault(
        "heads/noise-of-places-in-a-smaller-vocabulary",
        "jaxinfer/speculative/proposers.py",
        "return choose_several(transformed, positions, rows.batch, width, stream=stream), transformed",
        "order = jnp.argsort(~jnp.isfinite(transformed).any(axis=0))\n"
        "    places = choose_several(transformed[:, order], positions, rows.batch, width, stream=stream)\n"
        "    return order[places].astype(jnp.int32), transformed",
        (ORACLE + "[eagle3 wide]",),
        "requests with a temperature reject what a head with a smaller vocabulary drafts",
    ),
    Fault(
        "heads/noise-of-the-token-before",
        ROUNDS,
        "draft_tokens_of(rows.positions + number + 1, logits",
        "draft_tokens_of(rows.positions + number, logits",
        (ORACLE + "[dflash]",),
        "requests with a temperature reject next to all drafts",
    ),
    Fault(
        "heads/logits-are-not-scaled",
        "jaxinfer/speculative/drafts.py",
        "scale = target.logit_scale if config.logit_scale == 1.0 else config.logit_scale",
        "scale = config.logit_scale",
        ("tests/speculative/test_heads.py::test_logits_are_scaled_as_the_targets",),
        "requests with a temperature draw drafts from another distribution than the target's",
    ),
    Fault(
        "heads/a-block-has-no-more-drafts-than-tokens",
        CONFIG,
        "self.block_size - (not self.drafts_at_root) if",
        "self.block_size if",
        (SETTINGS,),
        "DFlash heads are given a draft more than their block has",
    ),
    Fault(
        "heads/a-head-is-rounded-when-it-is-opened",
        "jaxinfer/loading.py",
        "loaded = load_model(source, dtype=dtype, **opening)",
        'loaded = load_model(source, dtype=dtype, quantize="int4-g32", **opening)',
        (PAGES + "test_as_many_drafts_are_accepted_as_the_head_has_right",),
        "heads are rounded to 4 bits without having been asked to, and accepted less",
    ),
)

FAULTS = (*TAPS, *PAIRS, *IN_BLOCKS, *VOCABULARIES)
