"""Data that drafts are trained on."""

from types import SimpleNamespace

from jaxinfer.cli.training_data import writer
from jaxinfer.training.texts import TargetTextRequest


def test_greedy_texts_are_written_apart_from_sampled_ones():
    """In one batch the noise of a sampled row is made for all rows. Texts come in the order of the requests."""
    calls = []

    def generate(prompts, params, use_tqdm):
        calls.append([one.temperature for one in params])
        return [SimpleNamespace(outputs=[SimpleNamespace(error=None, token_ids=prompt)]) for prompt in prompts]

    temperatures = [1.0, 0.0, 0.5, 0.0, 0.0]
    requests = [TargetTextRequest((number,), 4, warmth, 0) for number, warmth in enumerate(temperatures)]
    assert writer(SimpleNamespace(generate=generate))(requests) == [[0], [1], [2], [3], [4]]
    assert calls == [[0.0, 0.0, 0.0], [1.0, 0.5]]
    calls.clear()
    assert writer(SimpleNamespace(generate=generate))(requests[1:2]) == [[1]]
    assert calls == [[0.0]]
