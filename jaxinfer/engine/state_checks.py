"""What an engine does not do yet for models whose layers keep a state."""

from jaxinfer.models import ModelConfig
from jaxinfer.speculative import Draft, ModelDraft


def check_states(config: ModelConfig, draft: Draft | None, num_devices: int) -> None:
    """Raises ValueError for a draft or several devices beside layers that are not attention, in the model or its draft,
    and for a model without attention."""
    for one in (config, *([draft.config] if isinstance(draft, ModelDraft) else [])):
        kinds = ", ".join(sorted({kind for kind in one.layer_kinds if kind != "attention"}))
        if not kinds:
            continue
        if draft is not None:
            raise ValueError(f"{one.architecture} has layers of kind {kinds}: speculation does not work with them yet")
        if num_devices > 1:
            raise ValueError(
                f"{one.architecture} has layers of kind {kinds}: they run on one device, not {num_devices}"
            )
        if not one.attention_layers:
            raise ValueError(f"{one.architecture} has no layer with attention: an engine needs one")
