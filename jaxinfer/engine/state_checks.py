"""What an engine does not do for models whose layers keep a state, or choose the tokens they attend to, and on meshes
that divide pages."""

from collections.abc import Sequence

from jaxinfer import parallel
from jaxinfer.cache import check_rotated
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import ModelConfig
from jaxinfer.speculative import Draft


def check_states(
    config: ModelConfig,
    draft: Draft,
    num_devices: int,
    options: EngineOptions,
    kv_dtypes: Sequence[str | None],
) -> None:
    """Raises ValueError for several devices or a draft with branches (`options.draft_tree`) beside layers that are not
    attention, in the model or its draft, for a model without attention, and as `_check_indexer` and `check_rotated`.
    `kv_dtypes` are those of the caches that there are."""
    draft_tree = options.draft_tree
    _check_indexer(config, draft, num_devices, [dtype for dtype in kv_dtypes if dtype], draft_tree)
    models = (config, *(own for own, _ in draft.own))
    for one, kv_dtype in zip(models, kv_dtypes, strict=False):
        if kv_dtype is not None:
            check_rotated(one, kv_dtype)
    for one in models:
        kinds = ", ".join(sorted({kind for kind in one.layer_kinds if kind != "attention"}))
        if not kinds:
            continue
        if draft_tree is not None and max(draft_tree) > 1 and one.recurrent_layers:
            raise ValueError(
                f"{one.architecture} has layers of kind {kinds}: states follow one chain of tokens, so "
                f"draft_tree={tuple(draft_tree)} cannot have branches; draft a chain with num_draft_tokens"
            )
        if num_devices > 1:
            raise ValueError(
                f"{one.architecture} has layers of kind {kinds}: they run on one device, not {num_devices}"
            )
        if not one.attention_layers:
            raise ValueError(f"{one.architecture} has no layer with attention: an engine needs one")


def check_sequence_axis(mesh: parallel.AnyMesh | None, page_size: int, options: EngineOptions) -> None:
    """Raises ValueError for pages that the "sequence" axis of the mesh does not divide, and for a draft with branches
    beside such an axis."""
    count = 1 if mesh is None else parallel.axis_size(mesh, "tokens")
    if page_size % count:
        raise ValueError(f"page_size={page_size} is not a multiple of {count}, the mesh's axis {parallel.SEQUENCE!r}")
    tree = options.draft_tree
    if count > 1 and tree is not None and max(tree) > 1:
        raise ValueError(
            f"draft_tree={tuple(tree)} cannot have branches on a mesh with {parallel.SEQUENCE}={count}: tokens of an "
            "accepted branch would move between devices; draft a chain with num_draft_tokens"
        )


def _check_indexer(
    config: ModelConfig, draft: Draft, num_devices: int, kv_dtypes: Sequence[str], tree: Sequence[int] | None
) -> None:
    """Raises ValueError for several devices, a tree of drafts or a cache of 8 bits beside an indexer, in the model or
    its draft."""
    for one in (config, *(own for own, _ in draft.own)):
        if one.mla is None or not one.mla.has_indexer:
            continue
        name = f"{one.architecture}, whose indexer chooses the tokens that a query attends to,"
        if num_devices > 1:
            raise ValueError(f"{name} runs on one device, not {num_devices}")
        if tree is not None:
            raise ValueError(f"{name} does not verify trees of drafts (draft_tree), only chains")
        if narrow := [dtype for dtype in kv_dtypes if dtype.startswith(("int", "float8"))]:
            raise ValueError(f"{name} has no cache of {narrow[0]} (kv_dtype): index keys have at least 16 bits")
