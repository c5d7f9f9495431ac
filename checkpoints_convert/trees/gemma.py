"""Gemma 1 to 3 in Flax: the NNX modules of flax/examples/gemma and of `tunix.models.gemma3`, and the Linen parameters
of google-deepmind/gemma (`gemma.gm`), in its nested form and that of its checkpoints."""

from checkpoints_convert.trees.rules import TreeForm, TreeRule, numbered

GEMMA = TreeForm(
    "Gemma",
    outside=(
        TreeRule("embedder.input_embedding", "embed", "V D"),
        TreeRule("final_norm.scale", "final_norm.weight", "D"),
    ),
    inside=(
        TreeRule("pre_attention_norm.scale", "attention_norm.weight", "D"),
        TreeRule("attn.q_einsum.w", "attention.q_proj.weight", "Hq D K", "D Hq*K"),
        TreeRule("attn.kv_einsum.w", "attention.k_proj.weight", "2 Hkv D K", "D Hkv*K", 0),
        TreeRule("attn.kv_einsum.w", "attention.v_proj.weight", "2 Hkv D K", "D Hkv*K", 1),
        TreeRule("attn.qkv_einsum.w", "attention.q_proj.weight", "3 Hq D K", "D Hq*K", 0),
        TreeRule("attn.qkv_einsum.w", "attention.k_proj.weight", "3 Hkv D K", "D Hkv*K", 1),
        TreeRule("attn.qkv_einsum.w", "attention.v_proj.weight", "3 Hkv D K", "D Hkv*K", 2),
        TreeRule("attn.attn_vec_einsum.w", "attention.o_proj.weight", "Hq K D", "Hq*K D"),
        TreeRule("attn._query_norm.scale", "attention.q_norm.weight", "K"),
        TreeRule("attn._key_norm.scale", "attention.k_norm.weight", "K"),
        TreeRule("post_attention_norm.scale", "attention_post_norm.weight", "D"),
        TreeRule("pre_ffw_norm.scale", "mlp_norm.weight", "D"),
        TreeRule("post_ffw_norm.scale", "mlp_post_norm.weight", "D"),
        TreeRule("mlp.gate_proj.kernel", "mlp.gate_proj.weight", "D F"),
        TreeRule("mlp.up_proj.kernel", "mlp.up_proj.weight", "D F"),
        TreeRule("mlp.down_proj.kernel", "mlp.down_proj.weight", "F D"),
        # Linen's: [2, F, D] since Gemma 2, [2, D, F] before; checkpoints have a "w" below.
        *(
            TreeRule(f"mlp.gating_einsum{end}", f"mlp.{name}.weight", axes, "D F", part)
            for end in ("", ".w")
            for part, name in enumerate(("gate_proj", "up_proj"))
            for axes in ("2 F D", "2 D F")
        ),
        *(TreeRule(f"mlp.linear{end}", "mlp.down_proj.weight", "F D") for end in ("", ".w")),
    ),
    place=numbered("layers.", "layer_"),
)
