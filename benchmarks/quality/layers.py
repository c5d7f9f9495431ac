"""The loss of a cache of 4 bits by layer: KL of the next token with the keys, or the values, of one layer as int4
stores them, and everything else exact. Then int4 with keys of 8 bits in the layers whose keys lose most.

    python -m benchmarks.quality.layers [MODEL]

Whole texts in one pass, with keys and values as a cache would give them back. It prints only, and keeps no figures.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.quality.caches import TEXT_TOKENS
from benchmarks.quality.texts import TITLES, texts_for
from benchmarks.real.models import fetched_path
from jaxinfer.cache import check_rotated
from jaxinfer.cache.contiguous import attend_without_cache
from jaxinfer.calibration.quality import kl_divergence
from jaxinfer.loading import LoadedModel, load_model
from jaxinfer.measure.kv_report.measure import beginning, pieces
from jaxinfer.models import ModelConfig, Params, bind
from pallas_kernels.paged_attention import rotation
from pallas_kernels.paged_attention.layout import from_stored, to_stored

NUM_TEXTS = 4
EXACT = 32
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1)


class LayerReporter:
    """KL of caches whose keys and values have 8 bits, 4 or all of them in each layer, over texts.

    Raises ValueError for a model that cannot have a cache of 4 bits.
    """

    def __init__(self, model: LoadedModel, documents: Sequence[str]):
        if model.tokenizer is None:
            raise ValueError(f"{model.name} has no tokenizer, so it cannot read texts")
        check_rotated(model.config, "int4")
        self.config, self.params = model.config, model.params
        tokens = [model.tokenizer.encode_content(text) for text in documents]
        texts = pieces(tokens, beginning(model.tokenizer), TEXT_TOKENS, len(tokens))
        self.texts = [jnp.asarray(text) for text in texts if len(text) == TEXT_TOKENS][:NUM_TEXTS]
        exact = np.full(model.config.num_layers, EXACT)
        self._expected = [_log_probs(self.config, self.params, text, exact, exact) for text in self.texts]

    def kl(self, keys: Sequence[int], values: Sequence[int]) -> float:
        """The mean over all predicted tokens; bits of keys and values by layer."""
        pairs = zip(self.texts, self._expected, strict=True)
        bits = np.asarray(keys), np.asarray(values)
        parts = [
            kl_divergence(expected, _log_probs(self.config, self.params, text, *bits))[:-1] for text, expected in pairs
        ]
        return float(jnp.mean(jnp.stack(parts)))


@partial(jax.jit, static_argnums=0)
def _log_probs(config: ModelConfig, params: Params, tokens: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """float32 [T, V] of int32 tokens [T]; bits of keys and values int32 [layers]."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, **options) -> jax.Array:
        stored = _rounded(k, keys[layer]), _rounded(v, values[layer])
        return attend_without_cache(layer, q, *stored, window, **options)

    decoder = bind(config, params)
    hidden = decoder(tokens[None], jnp.arange(len(tokens))[None], attend)
    return jax.nn.log_softmax(decoder.logits(hidden[0]))


def _rounded(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Keys or values as a cache of int8, of int4, or an exact one gives them back."""
    eight = from_stored(*to_stored(x, "int8"), x.dtype)
    four = rotation.rotate_back(from_stored(*to_stored(x, "int4"), x.dtype))
    return jnp.select([bits == 8, bits == 4], [eight, four], x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", choices=TITLES, help="default: %(default)s")
    name = parser.parse_args().model
    model = load_model(name if name == "demo" else str(fetched_path(name)))
    reporter = LayerReporter(model, texts_for(name).measured)
    exact, four = ([bits] * model.config.num_layers for bits in (EXACT, 4))

    def only(layer: int) -> list[int]:
        return [4 if number == layer else EXACT for number in range(len(exact))]

    print(f"{name}: KL in nats, {len(reporter.texts)} texts of {TEXT_TOKENS} tokens")
    print(f"keys of 4 bits {reporter.kl(four, exact):.5f}, values of 4 bits {reporter.kl(exact, four):.5f}", flush=True)
    losses = []
    for layer in model.config.cached_layers:
        losses.append((reporter.kl(only(layer), exact), layer))
        values = reporter.kl(exact, only(layer))
        print(f"layer {layer}: keys {losses[-1][0]:.5f}, values {values:.5f}", flush=True)
    order = [layer for _, layer in sorted(losses, reverse=True)]
    for count in dict.fromkeys([0, *(round(share * len(order)) for share in SHARES)]):
        keys = [8 if layer in order[:count] else 4 for layer in range(len(exact))]
        print(f"keys of 8 bits in {count} layers, all else 4 bits: {reporter.kl(keys, four):.5f}", flush=True)


if __name__ == "__main__":
    main()
