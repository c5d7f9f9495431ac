"""Constants of masks, in all implementations of paged attention."""

# Bits of an ancestor mask; sequences with more new tokens are causal.
MAX_TREE_TOKENS = 32
# The score of a masked key. It is finite, so that a query that has seen only masked keys has no NaN; the sums of such a
# query are multiplied by exp(MASKED - score) = 0 at its first visible key.
MASKED = -1e30
