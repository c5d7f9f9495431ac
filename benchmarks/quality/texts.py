"""The texts of the measurements: Python source for the embedded models, Python's reference manual for the others.

The manual comes with every Python (`pydoc_data.topics`): English prose with some code, 400,000 characters.
"""

import pydoc_data.topics
from dataclasses import dataclass

from jaxinfer.training.corpus import held_out_files, standard_library

# Models by name, as `make models` gives them.
TITLES = {"demo": "demo", "smollm2": "SmolLM2 135M", "gemma3-270m": "Gemma 3 270M"}
NUM_FILES = 50
MIN_CHARS = 4_000


@dataclass(frozen=True)
class Texts:
    """Documents to calibrate on, others to measure on, and Python files whose beginnings are edited."""

    calibration: tuple[str, ...]
    measured: tuple[str, ...]
    code: tuple[str, ...]


def texts_for(model: str) -> Texts:
    """Those of a model by its name. The embedded pair was trained on its calibration texts and saw no others."""
    code = tuple(text for _, text in held_out_files(NUM_FILES))
    if model == "demo":
        corpus = standard_library()
        return Texts(corpus.train[::7], corpus.held_out, code)
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) >= MIN_CHARS]
    return Texts(tuple(topics[1::2]), tuple(topics[::2]), code)
