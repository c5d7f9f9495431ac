"""Trees of other libraries: ours, written in their forms, are read back; what does not fit is refused by name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints_convert.trees import read_tree
from jaxinfer.models import init_params
from tests.checkpoints_convert.trees.layouts import CASES, FORMS, config_for, maxtext, nested, numbered, tunix


def flat(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(("form", "name"), CASES)
def test_what_is_written_in_a_form_is_read_back(form, name):
    config = config_for(name)
    params = numbered(config)
    tree = read_tree(FORMS[form][0](config, params), config)
    tree.check()
    read, shapes = flat(tree.params()), tree.shapes()
    assert read.keys() == flat(params).keys()
    for path, leaf in flat(params).items():
        # MaxText's numbers are multiplied there and divided here.
        np.testing.assert_allclose(read[path], leaf, rtol=3e-7, atol=1e-7 if "norm" in path else 0, err_msg=path)
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in tree.each()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in shapes.items()
    }


def test_a_tree_of_ours_is_none_of_theirs():
    config = config_for("llama")
    assert read_tree(numbered(config), config) is None
    assert read_tree({"final_norm": {"weight": np.ones(32)}}, config) is None


@pytest.mark.slow
def test_modules_states_and_arrays_of_jax_are_read():
    config = config_for("qwen3")
    params = init_params(config, jax.random.key(0))
    theirs = jax.tree.map(nnx.Param, tunix(config, params))
    theirs["dropout"] = {"count": nnx.RngCount(jnp.uint32(0))}

    class Block(nnx.Module):
        def __init__(self, children):
            for name, child in children.items():
                setattr(self, str(name), child if isinstance(child, nnx.Variable) else nnx.data(Block(child)))

    for tree in (theirs, nnx.State(theirs), Block(theirs)):
        read = read_tree(tree, config)
        read.check()
        jax.tree.map(np.testing.assert_array_equal, read.params(), params)


def test_weights_are_made_when_they_are_taken_and_copied_only_if_wanted():
    config = config_for("llama")
    theirs = jax.tree.map(jnp.asarray, tunix(config, numbered(config)))
    tree = read_tree(theirs, config)
    given = theirs["layers"][0]["mlp"]["up_proj"]["kernel"]
    assert tree.params()["layers"]["0"]["mlp"]["up_proj"]["weight"] is given
    copy = tree.params(copies=True)["layers"]["0"]["mlp"]["up_proj"]["weight"]
    assert copy.unsafe_buffer_pointer() != given.unsafe_buffer_pointer()
    each = tree.each()
    given.delete()
    next(each)  # the embedding, before any layer


def test_what_is_missing_and_left_over_is_named_and_counted():
    config = config_for("llama")
    theirs = tunix(config, numbered(config))
    del theirs["layers"][1]["attn"]["v_proj"], theirs["final_norm"]
    theirs["layers"][0]["attn"]["q_norm"] = {"w": np.ones(8)}
    tree = read_tree(theirs, config)
    told = "Tunix's form, does not fit the model: 1 of its 20 arrays have no place: layers.0.attn.q_norm.w; 2 of the "
    told += "model's 21 weights are missing: final_norm.weight, layers.1.attention.v_proj.weight"
    with pytest.raises(ValueError, match=re.escape(told)):
        tree.check()
    del theirs["layers"][0]["attn"]["q_norm"]
    read_tree(theirs, config).check(is_partial=True)


def test_other_shapes_are_refused_with_both():
    config = config_for("llama")
    theirs = tunix(config, numbered(config))
    kernel = theirs["layers"][0]["attn"]["q_proj"]["w"]
    theirs["layers"][0]["attn"]["q_proj"]["w"] = kernel.reshape(32, 8, 4)  # as many numbers, of other heads
    told = "Tunix's 'layers.0.attn.q_proj.w' has shape [32, 8, 4], and the model's has [32, 4, 8] (D Hq K)"
    with pytest.raises(ValueError, match=re.escape(told)):
        read_tree(theirs, config).check()
    theirs = maxtext(config, numbered(config))
    layers = theirs["params"]["params"]["decoder"]["layers"]
    layers["mlp"]["wo"]["kernel"] = np.moveaxis(layers["mlp"]["wo"]["kernel"], 1, 0)
    with pytest.raises(ValueError, match=r"'decoder.layers.mlp.wo.kernel' has shape \[2, 48, 32\].*2 layers.*axis 1"):
        read_tree(theirs, config)


def test_maxtext_of_another_family_is_refused():
    config = config_for("gemma")
    with pytest.raises(ValueError, match="MaxText's form of GemmaForCausalLM is not known, only that of Llama"):
        read_tree(nested({"token_embedder.embedding": np.ones((97, 32))}), config)


def test_lora_pairs_are_an_adapter():
    """A and B as qwix makes them: of an einsum with the axes of the weight, of a linear layer flat."""
    config, random = config_for("gemma3"), np.random.default_rng(0)
    D, Hq, Hkv, K, F = 32, 4, 2, 8, 48
    shapes = {
        "attn.q_einsum.w": ((D, 3), (3, Hq, K)),
        "attn.kv_einsum.w": ((D, 3), (3, 2, Hkv, K)),
        "attn.attn_vec_einsum.w": ((Hq, K, 3), (3, D)),
        "mlp.down_proj.kernel": ((F, 3), (3, D)),
    }
    pairs = {name: [random.normal(size=shape) for shape in both] for name, both in shapes.items()}
    theirs = {
        f"layers.1.{name}_lora_{which}": array
        for name, both in pairs.items()
        for which, array in zip("ab", both, strict=True)
    }
    tree = read_tree(nested(theirs), config)
    with pytest.raises(ValueError, match=r"LoRA pairs of 4 weights \(layers.1.attn.q_einsum.w, "):
        tree.check(is_partial=True)
    tree.check(is_partial=True, has_pairs=True)
    low_rank = tree.adapter(2.0).low_rank
    q, kv, o, down = (pairs[name] for name in shapes)
    wanted = {
        "attention.q_proj": np.einsum("dr,rnk->dnk", *q).reshape(D, -1),
        "attention.k_proj": np.einsum("dr,rck->dck", kv[0], kv[1][:, 0]).reshape(D, -1),
        "attention.v_proj": np.einsum("dr,rck->dck", kv[0], kv[1][:, 1]).reshape(D, -1),
        "attention.o_proj": np.einsum("nkr,rd->nkd", *o).reshape(-1, D),
        "mlp.down_proj": down[0] @ down[1],
    }
    assert low_rank.keys() == {f"layers.1.{name}" for name in wanted}
    for name, change in wanted.items():
        pair = low_rank[f"layers.1.{name}"]
        np.testing.assert_allclose(pair.a @ pair.b, change, rtol=1e-12)
        assert pair.scale == 2.0
    del theirs["layers.1.attn.q_einsum.w_lora_b"]
    with pytest.raises(ValueError, match=r"'layers.1.attn.q_einsum.w' has _lora_a alone"):
        read_tree(nested(theirs), config).adapter(1.0)
