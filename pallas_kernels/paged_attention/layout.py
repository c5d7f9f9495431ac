"""Layouts of one layer's keys and values in pages, and conversions between them.

The scheduler only knows page ids; each kernel has its layout. `SeparatePages` is also the logical form in which tests
compare implementations. Attention reads stored values: new tokens are rounded to the cache's dtype first, so results do
not depend on how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import rotation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, Num

LANES = 128
SUBLANES = 8
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int4", "int8_int4")
# Caches whose values, or keys and values, are 4 bits of rotated numbers (`rotation`): the dtypes of keys and of values.
ROTATED = {"int4": ("int4", "int4"), "int8_int4": ("int8", "int4")}
LAYOUTS = ("separate", "interleaved", "bits")


class SeparatePages(NamedTuple):
    """Keys and values [pages, page, Hkv, K]; with int8 and int4, float32 scales [pages, Hkv, page], else None.

    Numbers of 4 bits lie two a byte, uint8 [pages, page, Hkv, K / 2], as `rotation.pack_nibbles`.
    If values are the first part of the keys (multi-head latent attention), v and v_scales are None.
    """

    k: Any
    v: Any
    k_scales: Any = None
    v_scales: Any = None


class InterleavedPages(NamedTuple):
    """Keys and values of a token interleaved in whole 32-bit words, so that appending a token is a plain copy.

    kv: [pages, page, rows / pack, pack, lanes] with pack = 4 / itemsize. With head_dim <= 64 one row of 128 lanes
      holds a head's key (lanes 0 to K-1) and value (lanes 64 to 64+K-1), and there are Hkv rows. With a larger
      head_dim a row holds a key (even rows) or a value (odd rows) in ceil(K / 128) * 128 lanes, and there are
      2 Hkv rows. Rows are padded to a multiple of pack; padding is zero. With int4 a byte has a number of the key (low
      bits) and the same of the value, and there are Hkv rows of ceil(K / 128) * 128 lanes.
    scales: with int8 and int4, float32 [pages, ceil(2 Hkv / 8) * 8, ceil(page / 128) * 128]: row 2h scales the keys of
      head h, row 2h+1 its values, one lane for each token of the page. None otherwise.
    """

    kv: Any
    scales: Any = None


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["dtype"])
@dataclass(frozen=True)
class BitPages:
    """`SeparatePages` of floats of 8 or 16 bits (`dtype`), stored as unsigned integers, for XLA:CPU.

    It gathers and scatters such integers in place but converts a whole array of such floats each time: 0.28 ms and
    12 ms for a step over 32 MiB of float8_e4m3fn.
    """

    k: Any
    v: Any
    dtype: str


Pages = SeparatePages | InterleavedPages | BitPages


@dataclass(frozen=True)
class PageShape:
    """Static facts of one layer's pages. Without `has_values`, values are the first part of the keys."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    has_values: bool = True

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"a cache of dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for name in ("num_pages", "page_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.is_rotated and (reason := rotation.unsupported_width(self.head_dim)) is not None:
            raise ValueError(f"a cache of dtype {self.dtype!r}: {reason}")
        if self.is_rotated and not self.has_values:
            raise ValueError(f"a cache of dtype {self.dtype!r} stores values apart from keys: no latent attention")

    @property
    def key_dtype(self) -> str:
        return key_dtype(self.dtype)

    @property
    def value_dtype(self) -> str:
        return value_dtype(self.dtype)

    @property
    def is_rotated(self) -> bool:
        """True if values, or keys and values, are stored rotated, in 4 bits."""
        return self.dtype in ROTATED

    @property
    def has_scales(self) -> bool:
        return self.dtype == "int8" or self.is_rotated

    @property
    def is_narrow_float(self) -> bool:
        """True if the dtype is a float of fewer than 32 bits."""
        return self.dtype != "float32" and not self.has_scales

    @property
    def pack(self) -> int:
        """Number of rows in a 32-bit word."""
        return 4 // jnp.dtype(self.element_dtype).itemsize

    @property
    def is_side_by_side(self) -> bool:
        """True if a row of the interleaved layout has the key of a head in its first half, the value in the second."""
        return self.head_dim <= LANES // 2 and self.dtype != "int4"

    @property
    def has_whole_heads(self) -> bool:
        """True if a row of the interleaved layout has both the key and the value of a head."""
        return self.is_side_by_side or self.dtype == "int4"

    @property
    def element_dtype(self) -> str:
        """The dtype of the interleaved layout's array."""
        return "uint8" if self.dtype == "int4" else self.dtype

    @property
    def num_rows(self) -> int:
        """Rows of a token in the interleaved layout, with padding."""
        rows = self.num_kv_heads if self.has_whole_heads else 2 * self.num_kv_heads
        return _round_up(rows, self.pack)

    @property
    def num_lanes(self) -> int:
        return _round_up(self.head_dim, LANES)

    def abstract(self, layout: str) -> Any:
        """The pages in `layout` as `jax.ShapeDtypeStruct`s."""
        if layout == "separate":
            keys, values = (
                jax.ShapeDtypeStruct((self.num_pages, self.page_size, self.num_kv_heads, width), dtype)
                for width, dtype in (
                    _stored_row(self.head_dim, logical) for logical in (self.key_dtype, self.value_dtype)
                )
            )
            scales = jax.ShapeDtypeStruct((self.num_pages, self.num_kv_heads, self.page_size), jnp.float32)
            scales = scales if self.has_scales else None
            if self.has_values:
                return SeparatePages(keys, values, scales, scales)
            return SeparatePages(keys, None, scales, None)
        if layout == "bits":
            if not self.is_narrow_float:
                raise ValueError(f"layout='bits' is for floats of 8 or 16 bits, not {self.dtype}")
            shape = (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)
            kv = jax.ShapeDtypeStruct(shape, _bits_of(self.dtype))
            return BitPages(kv, kv if self.has_values else None, self.dtype)
        if layout != "interleaved":
            raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
        if not self.has_values:
            raise ValueError("pages without values need layout='separate' or 'bits', not 'interleaved'")
        if self.key_dtype != self.value_dtype:
            raise ValueError(f"layout='interleaved' has no form of {self.dtype}, only 'separate'")
        dtype = jnp.dtype(self.element_dtype)
        shape = (self.num_pages, self.page_size, self.num_rows // self.pack, self.pack, self.num_lanes)
        kv = jax.ShapeDtypeStruct(shape, dtype)
        if not self.has_scales:
            return InterleavedPages(kv)
        rows, lanes = _round_up(2 * self.num_kv_heads, SUBLANES), _round_up(self.page_size, LANES)
        return InterleavedPages(kv, jax.ShapeDtypeStruct((self.num_pages, rows, lanes), jnp.float32))


def empty_pages(shape: PageShape, layout: str) -> Pages:
    """Zeroed pages in `layout`."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape.abstract(layout))


def layout_of(pages: Pages) -> str:
    """The name of the layout."""
    return {SeparatePages: "separate", InterleavedPages: "interleaved", BitPages: "bits"}[type(pages)]


def page_shape(pages: Pages, num_kv_heads: int, head_dim: int) -> PageShape:
    """The static facts of `pages`; raises ValueError if they were not made for these heads."""
    array = pages.kv if isinstance(pages, InterleavedPages) else pages.k
    dtype = pages.dtype if isinstance(pages, BitPages) else _logical_dtype(pages)
    has_values = isinstance(pages, InterleavedPages) or pages.v is not None
    shape = PageShape(array.shape[0], array.shape[1], num_kv_heads, head_dim, dtype, has_values)
    expected = shape.abstract(layout_of(pages))
    actual = jax.tree.map(lambda a: (a.shape, jnp.dtype(a.dtype).name), pages)
    wanted = jax.tree.map(lambda a: (a.shape, jnp.dtype(a.dtype).name), expected)
    if actual != wanted:
        raise ValueError(f"pages for {num_kv_heads} heads of {head_dim} are {wanted}; got {actual}")
    return shape


def pack(logical: SeparatePages, layout: str) -> Pages:
    """Converts from the logical form to `layout`."""
    if layout == "separate":
        return logical
    width = logical.k.shape[3] * (2 if logical.k.dtype == jnp.uint8 else 1)
    shape = page_shape(logical, logical.k.shape[2], width)
    if layout == "bits":
        return BitPages(_to_bits(logical.k), None if logical.v is None else _to_bits(logical.v), shape.dtype)
    kv = interleave(logical.k, logical.v, shape)
    if not shape.has_scales:
        return InterleavedPages(kv)
    target = shape.abstract(layout).scales
    scales = jnp.stack([logical.k_scales, logical.v_scales], axis=2).reshape(shape.num_pages, -1, shape.page_size)
    padding = [(0, wanted - size) for wanted, size in zip(target.shape, scales.shape, strict=True)]
    return InterleavedPages(kv, jnp.pad(scales, padding))


def unpack(pages: Pages, num_kv_heads: int, head_dim: int) -> SeparatePages:
    """Converts from any layout to the logical form."""
    if isinstance(pages, SeparatePages):
        return pages
    shape = page_shape(pages, num_kv_heads, head_dim)
    if isinstance(pages, BitPages):
        return SeparatePages(*(_from_bits(bits, shape.dtype) for bits in (pages.k, pages.v)))
    k, v = deinterleave(pages.kv, shape)
    if not shape.has_scales:
        return SeparatePages(k, v)
    scales = pages.scales[:, : 2 * num_kv_heads, : shape.page_size]
    return SeparatePages(k, v, scales[:, ::2], scales[:, 1::2])


def interleave(
    k: Num[Array, "*rows Hkv K"], v: Num[Array, "*rows Hkv K"], shape: PageShape
) -> Num[Array, "*rows _ _ _"]:
    """Stored k, v [..., Hkv, K] as rows of the interleaved layout [..., rows / pack, pack, lanes]."""
    leading = k.shape[:-2]
    if shape.dtype == "int4":
        rows = rotation.unpack_nibbles(k) | (rotation.unpack_nibbles(v) << 4)
    elif shape.is_side_by_side:
        half = [(0, 0)] * (k.ndim - 1) + [(0, LANES // 2 - shape.head_dim)]
        rows = jnp.concatenate([jnp.pad(k, half), jnp.pad(v, half)], axis=-1)
    else:
        rows = jnp.stack([k, v], axis=-2).reshape(*leading, 2 * shape.num_kv_heads, shape.head_dim)
    padding = [(0, shape.num_rows - rows.shape[-2]), (0, shape.num_lanes - rows.shape[-1])]
    rows = jnp.pad(rows, [(0, 0)] * len(leading) + padding)
    return rows.reshape(*leading, shape.num_rows // shape.pack, shape.pack, shape.num_lanes)


def deinterleave(
    kv: Num[Array, "*rows _ _ _"], shape: PageShape
) -> tuple[Num[Array, "*rows Hkv K"], Num[Array, "*rows Hkv K"]]:
    """Keys and values [..., Hkv, K] from rows [..., rows / pack, pack, lanes]."""
    rows = kv.reshape(*kv.shape[:-3], shape.num_rows, shape.num_lanes)
    if shape.dtype == "int4":
        rows = rows[..., : shape.num_kv_heads, : shape.head_dim]
        return rotation.pack_nibbles(rows & 15), rotation.pack_nibbles(rows >> 4)
    if shape.is_side_by_side:
        rows = rows[..., : shape.num_kv_heads, :]
        return rows[..., : shape.head_dim], rows[..., LANES // 2 : LANES // 2 + shape.head_dim]
    rows = rows[..., : 2 * shape.num_kv_heads, : shape.head_dim]
    return rows[..., ::2, :], rows[..., 1::2, :]


def to_stored(x: Float[Array, "*rows K"], dtype: str) -> tuple[Num[Array, "*rows _"], Any]:
    """x rounded to the dtype of a cache's keys or values: (values, float32 scales [...] for int8 and int4, else None).

    fp8: values are clipped to the largest finite number, since the cast would make them NaN; infinities become NaN, so
    that errors stay visible. int8: symmetric, scale = max|x| / 127 for each token and head; a NaN or infinity makes the
    scale NaN. int4: rotated, as `rotation.quantize`, two numbers a byte.
    """
    if dtype == "int4":
        codes, scales = rotation.quantize(x)
        return rotation.pack_nibbles(codes), scales
    if dtype == "int8":
        x = x.astype(jnp.float32)
        scales = jnp.max(jnp.abs(x), axis=-1) / 127.0
        # XLA's maximum may drop a NaN.
        scales = jnp.where(jnp.all(jnp.isfinite(x), axis=-1), scales, jnp.nan)
        values = jnp.round(x / jnp.where(scales > 0, scales, 1.0)[..., None])
        return jnp.clip(values, -127, 127).astype(jnp.int8), scales
    if dtype.startswith("float8"):
        largest = float(jnp.finfo(dtype).max)
        x = x.astype(jnp.float32)
        x = jnp.where(jnp.isinf(x), jnp.nan, jnp.clip(x, -largest, largest))
    return x.astype(dtype), None


def from_stored(
    values: Num[Array, "*rows _"], scales: Float32[Array, "*rows"] | None, dtype=jnp.float32
) -> Float[Array, "*rows _"]:
    """Stored values times their scales, in `dtype`; those of 4 bits are rotated."""
    wide = jnp.promote_types(dtype, jnp.float32)
    if values.dtype == jnp.uint8:
        values = to_numbers(values, wide)
    return values.astype(dtype) if scales is None else (values.astype(wide) * scales[..., None]).astype(dtype)


def to_numbers(values: Any, dtype: Any) -> jax.Array:
    """Stored values without their scales [..., K] in `dtype`; of those of 4 bits, uint8 [..., K / 2], the levels."""
    if values.dtype == jnp.uint8:
        return rotation.levels_of(rotation.unpack_nibbles(values), dtype)
    return values.astype(dtype)


def key_dtype(dtype: str) -> str:
    """The dtype of stored keys in a cache of `dtype`."""
    return ROTATED.get(dtype, (dtype, dtype))[0]


def value_dtype(dtype: str) -> str:
    """The dtype of stored values in a cache of `dtype`."""
    return ROTATED.get(dtype, (dtype, dtype))[1]


def dtype_name(dtype: Any) -> str:
    """The name of a cache's dtype: JAX's, or one of `ROTATED`."""
    return dtype if isinstance(dtype, str) and dtype in ROTATED else jnp.dtype(dtype).name


def queries_for(q: Float[Array, "*rows K"], dtype: str) -> Float[Array, "*rows K"]:
    """Queries as keys are stored in a cache of `dtype`: rotated if these are."""
    return rotation.rotate(q) if key_dtype(dtype) == "int4" else q


def output_of(out: Float[Array, "*rows K"], dtype: str) -> Float[Array, "*rows K"]:
    """The output of attention to values as a cache of `dtype` stores them: rotated back if these are rotated."""
    return rotation.rotate_back(out) if value_dtype(dtype) == "int4" else out


def append(
    pages: Pages,
    k: Float[Array, "T Hkv K"],
    v: Float[Array, "T Hkv W"],
    page: Int32[Array, " T"],
    slot: Int32[Array, " T"],
    *,
    is_unique: bool = False,
    by_rows: bool = False,
) -> Pages:
    """Writes each token's key and value at its (page, slot); a page or slot beyond the last drops the token.

    Pages without values store the keys only. `is_unique` asserts that no place occurs twice, dropped ones included, so
    that TPUs need no check for duplicates. `by_rows` scatters rows of tokens, for interleaved pages that a kernel reads
    in the same program: for whole tokens the TPU compiler changes the layout of the cache and copies all of it twice.
    """
    shape = page_shape(pages, k.shape[1], k.shape[2])
    (k_values, k_scales), (v_values, v_scales) = to_stored(k, shape.key_dtype), to_stored(v, shape.value_dtype)
    options: dict[str, Any] = {"mode": "drop", "unique_indices": is_unique, "wrap_negative_indices": False}

    def put(stored: Any, new: Any, heads: tuple[jax.Array, ...] = ()) -> Any:
        at = (page[:, None], *heads, slot[:, None]) if heads else (page, slot)
        return None if stored is None else stored.at[at].set(new, **options)

    if isinstance(pages, BitPages):
        return BitPages(put(pages.k, _to_bits(k_values)), put(pages.v, _to_bits(v_values)), shape.dtype)
    if isinstance(pages, SeparatePages):
        heads = (jnp.arange(shape.num_kv_heads),)
        return SeparatePages(
            put(pages.k, k_values),
            put(pages.v, v_values),
            put(pages.k_scales, k_scales, heads),
            put(pages.v_scales, v_scales, heads),
        )
    tokens = interleave(k_values, v_values, shape)
    rows = (page[:, None], slot[:, None], jnp.arange(tokens.shape[1]))
    kv = pages.kv.at[rows if by_rows else (page, slot)].set(tokens, **options)
    if not shape.has_scales:
        return InterleavedPages(kv)
    at = (page[:, None], jnp.arange(2 * shape.num_kv_heads), slot[:, None])
    scales = jnp.stack([k_scales, v_scales], axis=-1).reshape(k.shape[0], -1)
    return InterleavedPages(kv, pages.scales.at[at].set(scales, **options))


def move_tokens(
    pages: Pages,
    page_table: Int32[Array, "S P"],
    sources: Int32[Array, "S N"],
    destinations: Int32[Array, "S N"],
) -> Pages:
    """Copies stored keys and values of one layer from positions `sources` to `destinations` of the same sequences.

    All tokens are read before any is written. Donate the pages: the result aliases them. An entry is dropped if its two
    positions are equal or one is outside 0 .. P * page - 1 (pad with P * page); its table entries are not read. No
    destination may occur twice. Raises ValueError for operands of other shapes or dtypes.
    """
    num_pages, page_size = (pages.kv if isinstance(pages, InterleavedPages) else pages.k).shape[:2]
    if page_table.ndim != 2 or page_table.dtype != jnp.int32:
        raise ValueError(f"page_table is int32 [S, P]; got {page_table.dtype} {page_table.shape}")
    num_sequences, length = page_table.shape[0], page_table.shape[1] * page_size
    for name, positions in (("sources", sources), ("destinations", destinations)):
        is_table = positions.ndim == 2 and positions.shape[0] == num_sequences and positions.dtype == jnp.int32
        if not is_table or positions.shape != sources.shape:
            raise ValueError(
                f"sources and destinations are int32 [{num_sequences}, N]; {name} is {positions.dtype} "
                f"{positions.shape}, sources {sources.shape}"
            )
    is_moved = (sources != destinations) & (sources >= 0) & (sources < length)
    is_moved &= (destinations >= 0) & (destinations < length)

    def place(positions: jax.Array, dropped_page: int) -> tuple[jax.Array, jax.Array]:
        positions = jnp.where(is_moved, positions, 0)
        page = jnp.take_along_axis(page_table, positions // page_size, axis=1)
        return jnp.where(is_moved, page, dropped_page).reshape(-1, 1), (positions % page_size).reshape(-1, 1)

    source, destination = place(sources, 0), place(destinations, num_pages)

    def move(array: jax.Array) -> jax.Array:
        # A scatter of rows: for one of whole tokens the TPU compiler changes the layout of a bfloat16 cache and copies
        # all of it twice.
        is_scales = array.ndim == 3
        page, slot = (index[:, 0] for index in source)
        tokens = array.at[(page, slice(None), slot) if is_scales else (page, slot)].get(mode="clip")
        page, slot = destination
        rows = jnp.arange(tokens.shape[1])
        return array.at[(page, rows, slot) if is_scales else (page, slot, rows)].set(tokens, mode="drop")

    return jax.tree.map(move, pages)


def gather(pages: Pages, ids: Int32[Array, "*ids"], shape: PageShape) -> SeparatePages:
    """The pages `ids` in logical form: k, v [*ids, page, Hkv, K], scales [*ids, Hkv, page]. Ids must be valid."""

    def take(array):
        return array.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)

    if isinstance(pages, SeparatePages):
        return SeparatePages(*(None if array is None else take(array) for array in pages))
    if isinstance(pages, BitPages):
        return SeparatePages(*(_from_bits(bits, shape.dtype, take) for bits in (pages.k, pages.v)))
    k, v = deinterleave(take(pages.kv), shape)
    if not shape.has_scales:
        return SeparatePages(k, v)
    scales = lax.slice_in_dim(take(pages.scales), 0, shape.page_size, axis=-1)
    return SeparatePages(
        k, v, scales[..., : 2 * shape.num_kv_heads : 2, :], scales[..., 1 : 2 * shape.num_kv_heads : 2, :]
    )


def token_keys(pages: SeparatePages | BitPages, page: Int32[Array, "*at"], slot: Int32[Array, "*at"]) -> jax.Array:
    """The keys [*at, Hkv, K] stored at each (page, slot), without scales."""
    keys = pages.k[page, slot]
    return _from_bits(keys, pages.dtype) if isinstance(pages, BitPages) else keys


def _stored_row(width: int, dtype: str) -> tuple[int, Any]:
    """Elements of a stored key or value, and their dtype."""
    return (width // 2, jnp.dtype("uint8")) if dtype == "int4" else (width, jnp.dtype(dtype))


def _logical_dtype(pages: SeparatePages | InterleavedPages) -> str:
    """The dtype of a cache: bytes of pages that are not `BitPages` are pairs of numbers of 4 bits."""
    arrays = (pages.kv, pages.kv) if isinstance(pages, InterleavedPages) else (pages.k, pages.v)
    names = tuple("" if a is None else "int4" if a.dtype == jnp.uint8 else jnp.dtype(a.dtype).name for a in arrays)
    return next((name for name, pair in ROTATED.items() if pair == names), names[0])


def _bits_of(dtype: str) -> Any:
    """The unsigned integer dtype with as many bits."""
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def _to_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _bits_of(jnp.dtype(x.dtype).name))


def _from_bits(bits: Any, dtype: str, take: Callable[[jax.Array], jax.Array] = lambda bits: bits) -> Any:
    return None if bits is None else lax.bitcast_convert_type(take(bits), dtype)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
