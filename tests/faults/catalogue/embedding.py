"""Faults in embeddings and scores of pairs."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "engine/a-mean-takes-cached-beginnings",
        "jaxinfer/engine/request.py",
        'self.pooling is not None and self.pooling.kind != "last"',
        'self.pooling is not None and self.pooling.kind == "cls"',
        ("tests/api/test_embedding.py::test_beginnings_are_reused_for_the_last_token_only",),
        "the mean of a text whose beginning is cached leaves that beginning out",
    ),
    Fault(
        "engine/a-chunk-replaces-the-sum",
        "jaxinfer/engine/scoring.py",
        "values.copy() if sequence.pooled is None else sequence.pooled + values",
        "values.copy()",
        ("tests/api/test_embedding.py::test_vectors_are_the_pooled_hidden_states",),
        "the mean of a text of several chunks is that of its last one",
    ),
    Fault(
        "engine/rows-of-others-count-with-weight-zero",
        "jaxinfer/engine/programs/__init__.py",
        "jnp.where(is_inside[:, None], hidden.astype(jnp.float32), 0)",
        "is_inside[:, None] * hidden.astype(jnp.float32)",
        ("tests/api/test_embedding.py::test_rows_that_are_not_finite_stay_apart",),
        "a text whose hidden states are not finite spoils the vectors of its batch mates",
    ),
    Fault(
        "engine/vectors-keep-their-length",
        "jaxinfer/api/embedding.py",
        "return _normalized(pooled) if normalizes else pooled",
        "return pooled",
        ("tests/api/test_embedding.py::test_dimensions_are_cut_before_the_length_is_made_one",),
        "products of vectors are no cosines",
    ),
)
