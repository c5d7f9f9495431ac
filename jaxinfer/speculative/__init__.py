"""Speculative decoding: draft proposers, verification by the target model, adaptive draft length.

Names are resolved when first used: what drafts is plain Python on the host, and what imports it must not load JAX.
"""

from typing import TYPE_CHECKING

from jaxinfer.lazy_names import first_with

if TYPE_CHECKING:
    from jaxinfer.speculative.acceptance import Walk, walk
    from jaxinfer.speculative.adaptive import AcceptanceEstimate, LengthController, SharedRows
    from jaxinfer.speculative.drafts import (
        NO_DRAFT,
        OWN_HEAD,
        Draft,
        HeadDraft,
        LayersDraft,
        ModelDraft,
        NgramDraft,
        draft_by_name,
        head_for,
        names_kind,
        register_draft,
    )
    from jaxinfer.speculative.proposers import (
        BoundProposer,
        DraftDecoder,
        DraftRows,
        DraftSlots,
        DraftState,
        LayersProposer,
        ModelProposer,
        NgramProposer,
        ObservedRows,
        ObservingDraft,
        Proposal,
        Proposer,
        catch_up,
        draft_tokens_of,
        init_draft_slots,
        keep_path,
        propose_chain,
        propose_ngram,
        propose_tree,
        record,
    )
    from jaxinfer.speculative.statistics import SpeculationStats, best_length, expected_speedup
    from jaxinfer.speculative.tree import TokenTree, chain

__all__ = [
    "NO_DRAFT",
    "OWN_HEAD",
    "AcceptanceEstimate",
    "BoundProposer",
    "Draft",
    "DraftDecoder",
    "DraftRows",
    "DraftSlots",
    "DraftState",
    "HeadDraft",
    "LayersDraft",
    "LayersProposer",
    "LengthController",
    "ModelDraft",
    "ModelProposer",
    "NgramDraft",
    "NgramProposer",
    "ObservedRows",
    "ObservingDraft",
    "Proposal",
    "Proposer",
    "SharedRows",
    "SpeculationStats",
    "TokenTree",
    "Walk",
    "best_length",
    "catch_up",
    "chain",
    "draft_by_name",
    "draft_tokens_of",
    "expected_speedup",
    "head_for",
    "init_draft_slots",
    "keep_path",
    "names_kind",
    "propose_chain",
    "propose_ngram",
    "propose_tree",
    "record",
    "register_draft",
    "walk",
]

__getattr__ = first_with(__name__, __all__, "drafts", "statistics", "adaptive", "tree", "proposers", "acceptance")
