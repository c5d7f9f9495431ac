"""Small calls of paged attention, a name for each edge case, to compare with dense attention."""

from pallas_kernels.paged_attention.shapes import PagedShape


def _decode(keys: tuple[int, ...], **options) -> PagedShape:
    return PagedShape(tuple((1, n) for n in keys), max_query_length=1, **options)


SMALL = {
    "decode_around_a_page": _decode((1, 15, 16, 17, 33)),
    "decode_one_sequence": _decode((40,)),
    "decode_empty_slots": PagedShape(((0, 0), (1, 20), (0, 7), (1, 3), (0, 0)), max_query_length=1, num_padding=2),
    "decode_64_sequences": _decode(tuple(1 + (7 * i) % 45 for i in range(64)), head_dim=64, heads=(2, 1)),
    "decode_odd_heads": _decode((5, 37), heads=(3, 3)),
    "decode_groups_7": _decode((5, 37), heads=(7, 1)),
    "decode_groups_16": _decode((5, 37), heads=(16, 1)),
    "decode_heads_1": _decode((5, 37), heads=(1, 1)),
    "decode_head_dim_80": _decode((18, 37), head_dim=80),
    "decode_head_dim_96": _decode((18, 37), head_dim=96),
    "decode_head_dim_128": _decode((18, 37), head_dim=128),
    "decode_head_dim_256": _decode((18, 37), head_dim=256),
    "decode_page_32": _decode((31, 32, 33, 70), page_size=32),
    "decode_page_64": _decode((63, 65, 130), page_size=64),
    "decode_page_128": _decode((128, 129), page_size=128),
    "decode_window_in_a_page": _decode((3, 16, 40, 61), window=5),
    "decode_window": _decode((3, 16, 40, 61), window=20),
    "decode_soft_cap_sinks": _decode((3, 40), soft_cap=2.0, sinks=True, scale=0.3),
    "decode_bf16": _decode((17, 40), dtype="bfloat16", cache_dtype="bfloat16", head_dim=128),
    "decode_e4m3": _decode((17, 40), dtype="bfloat16", cache_dtype="float8_e4m3fn", head_dim=128),
    "decode_e5m2": _decode((17, 40), dtype="bfloat16", cache_dtype="float8_e5m2", head_dim=128),
    "decode_int8": _decode((17, 40), dtype="bfloat16", cache_dtype="int8", head_dim=128),
    "decode_int8_head_dim_64": _decode((17, 40), cache_dtype="int8", heads=(6, 3)),
    "decode_int8_page_64": _decode((63, 65, 130), cache_dtype="int8", page_size=64, head_dim=128),
    "verify": PagedShape(((4, 4), (4, 19), (2, 33), (0, 0), (1, 16)), max_query_length=4),
    "verify_padded_slots": PagedShape(((3, 9), (1, 40), (0, 0), (4, 17)), max_query_length=4, gap=1, num_padding=3),
    "verify_bf16": PagedShape(
        ((8, 40), (5, 8)), max_query_length=8, dtype="bfloat16", cache_dtype="bfloat16", head_dim=128
    ),
    "verify_int8": PagedShape(
        ((8, 40), (5, 8)), max_query_length=8, dtype="bfloat16", cache_dtype="int8", head_dim=128
    ),
    "verify_window_soft_cap_sinks": PagedShape(
        ((4, 40), (3, 9)), max_query_length=4, window=6, soft_cap=5.0, sinks=True
    ),
    "verify_tree": PagedShape(((8, 40), (6, 6), (1, 17), (12, 30)), max_query_length=16, tree=True),
    "verify_tree_window": PagedShape(((8, 40), (6, 6), (12, 50)), max_query_length=16, tree=True, window=7),
    "prefill_from_nothing": PagedShape(((17, 17), (40, 40))),
    "prefill_chunk": PagedShape(((20, 45), (33, 60))),
    "prefill_window": PagedShape(((20, 45), (50, 60)), window=9),
    "prefill_soft_cap_sinks": PagedShape(((20, 45),), soft_cap=4.0, sinks=True, heads=(4, 1)),
    "prefill_bf16": PagedShape(((40, 70),), dtype="bfloat16", cache_dtype="bfloat16", head_dim=128, heads=(8, 2)),
    "prefill_int8": PagedShape(((40, 70),), dtype="bfloat16", cache_dtype="int8", head_dim=128, heads=(8, 2)),
    "prefill_e4m3": PagedShape(((20, 30),), dtype="bfloat16", cache_dtype="float8_e4m3fn", head_dim=128, heads=(8, 2)),
    "mixed": PagedShape(((1, 33), (20, 20), (0, 0), (1, 1), (30, 50), (4, 9)), num_padding=5),
    "mixed_tree": PagedShape(((5, 33), (40, 45), (20, 50)), tree=True),
}
