"""`LLM` takes trees of other libraries where it takes its own: at the start and in an update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM
from tests.checkpoints_convert.trees.layouts import config_for, maxtext, numbered, tunix
from tests.engine.test_weights import RUN

TEXT = [5, 9, 33, 71, 2, 60, 41]


def scores(llm):
    return llm.score([TEXT], use_tqdm=False)[0].raw


def test_a_model_is_made_and_updated_from_a_tree_of_tunix_as_from_ours():
    config = config_for("qwen3")
    old, new = numbered(config), numbered(config, seed=1)
    with LLM((config, new), **RUN) as fresh:
        expected = scores(fresh)
    with LLM((config, tunix(config, old)), **RUN) as llm:
        jax.tree.map(np.testing.assert_array_equal, llm.params.copy(), old)
        before = scores(llm)
        theirs = jax.tree.map(jnp.asarray, tunix(config, new))
        assert llm.update_params(theirs, version="one") == "one"
        for leaf in jax.tree.leaves(theirs):
            leaf.delete()  # they stay the caller's
        assert scores(llm) == expected != before
        # Nothing is written of a tree with an array too many, or of only some weights without `partial`.
        for tree, told in (
            ({**tunix(config, old), "lm_head": {"w": old["embed"].T}}, "1 of its 25 arrays have no place: lm_head.w"),
            ({"final_norm": {"w": old["final_norm"]["weight"]}}, "23 of the model's 24 weights are missing"),
        ):
            with pytest.raises(ValueError, match=told):
                llm.update_params(tree)
        assert scores(llm) == expected
        llm.update_params(tree, partial=True)
        np.testing.assert_array_equal(llm.params["final_norm"]["weight"], old["final_norm"]["weight"])
        np.testing.assert_array_equal(llm.params["embed"], new["embed"])
        # A form by another library, rounded and placed as the weights are.
        llm.update_params(maxtext(config, new))
        assert scores(llm) == expected


def test_a_configuration_of_nothing_known_is_refused():
    with pytest.raises(
        TypeError, match=r"a configuration of jaxinfer or of a model of Tunix, not with dict \{'a': 1\}"
    ):
        LLM(({"a": 1}, {}))
