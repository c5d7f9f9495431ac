"""What a cache of 8 or 4 bits costs in quality: held-out text through the engine, against a float32 cache.

    python -m benchmarks.kv_cache_quality [--model demo] [--files 8] [--tokens 512] [--json PATH]

The files are those of `jaxinfer.training.corpus.held_out_files`: none was in the embedded pair's training data.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from jaxinfer.engine.cache_quality import CacheQuality, cache_quality
from jaxinfer.loading import load_model
from jaxinfer.training.corpus import held_out_files

KV_DTYPES = ("float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2", "int8_int4", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model)
    if loaded.tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer")
    texts = [loaded.tokenizer.encode(text)[: arguments.tokens] for _, text in held_out_files(arguments.files)]
    found = cache_quality(loaded.config, loaded.params, texts, KV_DTYPES, kv_scales=loaded.kv_scales)
    print(f"{arguments.model}: {len(texts)} held-out files, {found[0].num_tokens:,} predicted tokens")
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n", encoding="utf-8")


def table(rows: list[CacheQuality]) -> str:
    lines = [
        "| kv_dtype | bytes per token | mean KL (nats) | largest KL | perplexity | same best token |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in rows:
        figures = f"{one.kl:.2e} | {one.max_kl:.2e} | {one.perplexity:.4f} | {one.top1_agreement:.2%}"
        lines.append(f"| {one.kv_dtype} | {one.bytes_per_token:,.0f} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
