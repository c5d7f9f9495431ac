"""Trainings of seconds in place of hours: sizes and steps of what has no option for it, and no plots."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

GENERATED = "generated.jsonl"


def install() -> None:
    """Changes `jaxinfer distill` and `train-head` in this process, and adds a `jaxinfer train-demo`."""
    from jaxinfer import compilation_cache
    from jaxinfer.cli import distill, train_head, training_data
    from jaxinfer.models import RopeConfig
    from jaxinfer.training import card as draft_card
    from jaxinfer.training import corpus, head_card
    from jaxinfer.training import texts as written
    from tools.train_demo import card
    from tools.train_demo import training as demo
    from tools.train_demo.command import register

    register()

    compilation_cache.enable()
    compilation_cache.keep_all()
    compilation_cache.enable = lambda: None
    options = distill._training_options

    def few(given: Any) -> Any:
        return replace(options(given), checkpoint_every=2, evaluate_every=4, held_out_texts=2, warmup_steps=1)

    distill._training_options = few
    head_options, writer = train_head._head_options, training_data.writer

    def few_of_a_head(*given: Any) -> Any:
        return replace(head_options(*given), checkpoint_every=2, evaluate_every=4, warmup_steps=1)

    def recorded(llm: Any) -> Any:
        """Each text that is generated is a line of `generated`, beside the folder of the run."""
        generate = writer(llm)

        def generate_and_record(requests: Any) -> Any:
            answers = generate(requests)
            with (Path(llm.name).parents[1] / GENERATED).open("a") as file:
                file.writelines(f"{json.dumps([request.prompt, request.seed])}\n" for request in requests)
            return answers

        return generate_and_record

    train_head._head_options, written.CHUNK = few_of_a_head, 4
    training_data.writer = train_head.writer = recorded
    # What is measured differs between runs.
    distill.measure_speeds = train_head.measure_speeds = lambda *given: {1: 1.0}
    head_card.plot_training = lambda path, history, *more: path.write_text(str(history))
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    rest: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 40, "rope": RopeConfig(rotary_dim=40), "vocab_size": 300}
    demo.TARGET = replace(demo.TARGET, **sizes, **rest)
    demo.DRAFT_START = demo.TARGET
    demo.VOCAB_SIZE = rest["vocab_size"]
    demo.CONTEXT = card.CONTEXT = 16
    demo.TARGET_PHASES = (demo.TrainingPhase(3, 2, 16), demo.TrainingPhase(2, 2, 32))
    demo.DRAFT_PHASES = (demo.TrainingPhase(3, 2, 16),)
    demo.TrainOptions = partial(demo.TrainOptions, checkpoint_every=2, log_every=1)  # type: ignore[misc]
    demo.DISTILLATION = demo.DistillOptions(
        num_steps=4, checkpoint_every=2, evaluate_every=2, held_out_texts=2, num_texts=8, batch_size=2, length=32,
        min_prompt=4, max_prompt=8, warmup_steps=1,
    )  # fmt: skip
    card.plot_loss = lambda path, model: path.write_text(str(model.result.history))
    draft_card.plot_distillation = lambda path, result: path.write_text(str(result.history))
    texts = tuple(f"def function_{number}(x):\n    return x + {number}\n\n" * 12 for number in range(8))
    demo.corpus.standard_library = lambda: corpus.Corpus(texts[2:], texts[:2])
