# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quantization
#
# Decoding reads every weight once per step, so a model whose weights take a quarter of the bytes can decode up to four times as
# fast and fits a quarter of the memory. The price is error: each weight becomes one of a few values. This notebook
# quantizes the embedded model in many ways and asks what each bit buys: first the error of the weights, then what counts, how far
# the model's predictions move. Nothing is downloaded; it takes less than a minute on a CPU.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM
from jaxinfer.calibration import CalibrationOptions, FloatModel, quantize_model
from jaxinfer.quantization import QuantizedArray, quantize, quantize_params
from jaxinfer.training.corpus import held_out_files, standard_library
from jaxinfer.training.objectives import sequence_logits

with LLM("demo", max_seqs=1, max_model_len=128) as llm:
    config, tokenizer = llm.config, llm.tokenizer
    params = jax.tree.map(jnp.copy, llm.params)  # ours: they outlive the LLM


def is_quantized(leaf):
    return isinstance(leaf, QuantizedArray)


# %% [markdown]
# ## How a weight becomes few bits
#
# Weights are cut into *groups*, and each group gets a *scale*. The simplest rule, round to nearest (RTN), divides by the scale, rounds
# to an integer of b bits and stores that: w ≈ scale · q. A small group follows the weights more closely, and its
# scales cost more: with 16-bit scales, a group of g weights takes b + 16 / g bits a weight.
#
# Other formats place their values differently. NF4 (Dettmers et al. 2023, *QLoRA*, section 3) puts 16 values where a normal
# distribution has equal shares of its mass, FP4 and FP8 are tiny floating-point numbers, denser near zero, and MXFP4 (OCP
# Microscaling 1.0) has scales that are powers of two.

# %%
weight = params["layers"]["2"]["mlp"]["up_proj"]["weight"]
four = quantize(weight, "int4-g128")
print(f"a weight {weight.shape}: values {four.values.dtype}, scales {four.scales.shape}")
print(np.asarray(weight[:4, 0]), "->", np.asarray(four.values[:4, 0], int), "->", np.asarray(four.dequantize()[:4, 0]))

# %% [markdown]
# ## Error against bits, on real weights
#
# The relative error is ‖w - ŵ‖² / ‖w‖², over the `up_proj` matrices of all layers. An ideal quantizer divides it by four for each bit
# that it gets more (6 dB a bit: Bennett 1948); a line of that slope is drawn for comparison.

# %%
linears = [layer["mlp"]["up_proj"]["weight"].astype(jnp.bfloat16) for layer in params["layers"].values()]
FAMILIES = {
    "int, a scale per output": ("int2", "int3", "int4", "int8"),
    "int, groups of 128": ("int2-g128", "int3-g128", "int4-g128", "int8-g128"),
    "int, groups of 32": ("int2-g32", "int3-g32", "int4-g32", "int8-g32"),
    "NF4": ("nf4",),
    "FP4": ("fp4",),
    "MXFP4": ("mxfp4",),
    "FP8": ("fp8",),
}


def bits_per_weight(leaf):
    """Bits as they could be stored: of the values, and of the scales with 16 bits (MXFP4: 8) each."""
    scale_bits = 8 if leaf.scheme.kind == "codebook" and leaf.scales.dtype == jnp.bfloat16 else 16
    return leaf.scheme.bits + scale_bits * leaf.scales.size / leaf.values.size


def weight_error(how):
    lost = total = 0.0
    for one in linears:
        exact = np.asarray(one, np.float32)
        lost += np.square(exact - np.asarray(quantize(one, how).dequantize())).sum()
        total += np.square(exact).sum()
    return lost / total


points = {
    family: [(bits_per_weight(quantize(linears[0], name)), weight_error(name)) for name in names]
    for family, names in FAMILIES.items()
}
figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
for (family, found), marker in zip(points.items(), "os^DPXv", strict=True):
    bits, errors = zip(*found, strict=True)
    axes.plot(bits, errors, marker=marker, label=family, linestyle="-" if len(found) > 1 else "none")
start = points["int, groups of 32"][0]
slope = np.array([start[0], 8.5])
axes.plot(slope, start[1] * 4.0 ** (start[0] - slope), color="black", linewidth=0.8, linestyle=":", label="four times less a bit")
axes.set(
    yscale="log", xlabel="bits a weight, scales included", ylabel="relative squared error of the weights",
    title="Each bit divides the error by about four; groups of 128 give most for their bits",
)  # fmt: skip
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# A scale for each 128 weights lowers the error by more than its eighth of a bit would elsewhere; a scale for each 32 takes half a
# bit, and on these weights that half bit is better spent on the values. NF4 beats integers of as many bits, since weights are
# nearly normal; FP8 is made for numbers of many magnitudes, such as activations, and int8 is better for weights.
#
# ## What the model loses
#
# The error of a weight does not say what it does to the model: some weights multiply large activations and matter far more.
# We therefore compare predictions. KL(float ‖ quantized), in nats a token, is how far the quantized model's
# distribution of the next token is from the float model's, on text that neither calibration nor training saw.
#
# Methods that look at activations do better with the same bits:
#
# - **GPTQ** (Frantar et al. 2022) quantizes one input after another, and lets the inputs that are still free make up for the error.
# - **AWQ** (Lin et al. 2023) scales inputs with large activations up before rounding, so that they lose less.

# %%
LENGTH = 128


def rows(texts, count):
    """int32 [count, LENGTH] of tokens."""
    tokens = [token for text in texts for token in tokenizer.encode(text)[: 4 * LENGTH]]
    return np.array(tokens[: count * LENGTH], np.int32).reshape(count, LENGTH)


calibration = rows(standard_library().train[::31][:12], 12)
held_out = rows([text for _, text in held_out_files(8)], 8)
logits = jax.jit(lambda params: jax.nn.log_softmax(sequence_logits(config, params, held_out)))
exact = np.asarray(logits(params))


def divergence(quantized):
    """KL in nats a token. With weights dequantized, one compiled program serves all methods."""
    floats = jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf.astype(jnp.float32), quantized, is_leaf=is_quantized
    )
    found = np.asarray(logits(floats))
    return float((np.exp(exact) * (exact - found)).sum(axis=-1).mean())


def size(quantized):
    """Bytes of the linear layers' weights, as an accelerator stores them."""
    leaves = [leaf for leaf in jax.tree.leaves(quantized["layers"], is_leaf=is_quantized) if is_quantized(leaf)]
    return sum(bits_per_weight(leaf) * leaf.values.size / 8 for leaf in leaves)


bfloat16 = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
results = {}
for name in ("int8", "nf4", "int4-g128", "int4-g32", "int3-g128", "int2-g32"):
    quantized = quantize_params(bfloat16, name)
    results["RTN", name] = (size(quantized), divergence(quantized))
model = FloatModel.of(config, params)
for method in ("awq", "gptq"):
    quantized = quantize_model(model, CalibrationOptions(method, bits=4), calibration).params
    results[method.upper(), "int4-g128"] = (size(quantized), divergence(quantized))
whole = sum(2 * leaf.size for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim >= 2)
for (method, name), (num_bytes, kl) in results.items():
    print(f"{method:<6}{name:<12}{num_bytes / 2**20:6.2f} MiB, {num_bytes / whole:4.0%} of bfloat16   KL {kl:.5f}")

# %% [markdown]
# ## The Pareto picture
#
# Which way is best depends on how many bytes there are. A way is *Pareto optimal* if no other is smaller and better at once; the
# line connects those. Everything above the line can be had cheaper or better.

# %%
best, front = np.inf, []
for key, (num_bytes, kl) in sorted(results.items(), key=lambda item: item[1]):
    if kl < best:
        best = kl
        front.append(key)
colors = {"RTN": "tab:gray", "AWQ": "tab:orange", "GPTQ": "tab:blue"}
figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
axes.plot(*zip(*((results[key][0] / 2**20, results[key][1]) for key in front), strict=True), color="black", linewidth=0.8,
          linestyle=":", label="Pareto front")  # fmt: skip
for method, color in colors.items():
    found = {name: value for (its_method, name), value in results.items() if its_method == method}
    sizes, losses = zip(*found.values(), strict=True)
    axes.plot(np.array(sizes) / 2**20, losses, "o", color=color, label=method)
    for name, (num_bytes, kl) in found.items():
        side = {"xytext": (-6, 0), "ha": "right"} if name.endswith("g128") else {"xytext": (6, 3)}
        axes.annotate(name, (num_bytes / 2**20, kl), textcoords="offset points", fontsize=8, color=color, **side)
gain = results["RTN", "int4-g128"][1] / results["GPTQ", "int4-g128"][1]
axes.set(
    yscale="log", xlabel=f"linear layers (MiB; bfloat16: {whole / 2**20:.1f})", ylabel="KL to the float model (nats a token)",
    title=f"Same bytes, better bits: GPTQ at 4 bits loses {gain:.1f} times less than rounding",
)  # fmt: skip
axes.legend(frameon=False, loc="upper right")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# A model this small has little to spare; large ones lose less at the same bits. `jaxinfer quantize` does this for a checkpoint,
# layer by layer, and `--method auto --max-kl` chooses the bits of each layer. `LLM(model, quantize="int4-g128")` rounds while
# loading. `docs/quantization.md` has the table over more text.

# %%
assert points["int, groups of 32"][2][1] < points["int, groups of 128"][2][1] < points["int, a scale per output"][2][1]
at_four_bits = {family: found[2] for family, found in points.items() if family.startswith("int")}
worth = {family: error * 4**bits for family, (bits, error) in at_four_bits.items()}  # the error, less what bits alone buy
assert min(worth, key=worth.get) == "int, groups of 128", worth
assert points["NF4"][0][1] < at_four_bits["int, groups of 32"][1]  # with fewer bits, too
for family in ("int, groups of 128", "int, groups of 32"):
    errors = [error for _, error in points[family]]
    assert 2.5 < errors[1] / errors[2] < 8, (family, errors)  # a bit more, about four times less
assert results["GPTQ", "int4-g128"][1] < results["RTN", "int4-g128"][1]
assert results["AWQ", "int4-g128"][1] < results["RTN", "int4-g128"][1]
assert results["RTN", "int8"][1] < 0.001 < results["RTN", "int4-g128"][1]
