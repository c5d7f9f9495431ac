"""What an engine does not do for models whose layers keep a state."""

from collections.abc import Sequence

from jaxinfer.models import ModelConfig
from jaxinfer.speculative import Draft, ModelDraft


def check_states(
    config: ModelConfig, draft: Draft | None, num_devices: int, draft_tree: Sequence[int] | None = None
) -> None:
    """Raises ValueError for several devices or a draft with branches (`draft_tree`, the widths) beside layers that are
    not attention, in the model or its draft, and for a model without attention."""
    for one in (config, *([draft.config] if isinstance(draft, ModelDraft) else [])):
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
