"""Makes engines with an adaptive length share rows between slots wherever they have such rounds."""

from jaxinfer.speculative import adaptive


def always_share_rows(monkeypatch) -> list[tuple[int, ...]]:
    """Returns a list that the lengths of these dispatches are added to."""
    choose, used = adaptive.LengthController.choose, []

    def share(self, num_slots, estimates, limits=None):
        shared = self._shared
        if shared is None or num_slots <= shared.above or not estimates:
            return choose(self, num_slots, estimates, limits)
        count = shared.num_draft_tokens if shared.predicts else adaptive._SHARED
        lengths = tuple(self._lengths(count, num_slots, estimates, limits))
        used.append(lengths)
        return adaptive.LengthChoice(shared.num_draft_tokens, lengths, None, shares_rows=True)

    monkeypatch.setattr(adaptive.LengthController, "choose", share)
    return used
