"""lm-eval against a server at sys.argv[1], by both of its models, on questions.jsonl and texts.jsonl in the working
directory.

Writes what it asked, what it made of the answers, and its scores to the file sys.argv[2]; the test compares them with
the library's own.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = TaskManager(include_path=str(Path(__file__).with_name("lm_eval_tasks")), include_defaults=False)


def evaluate(model, route, tasks, is_chat=False, **options):
    options = {"model": "tiny", "base_url": f"{sys.argv[1]}{route}", "max_length": 256, "max_retries": 1, **options}
    found = simple_evaluate(
        model, model_args=options, tasks=tasks, task_manager=TASKS, apply_chat_template=is_chat, bootstrap_iters=0
    )
    samples = {
        task: [{"arguments": one["arguments"], "answers": one["resps"]} for one in samples]
        for task, samples in found["samples"].items()
    }
    return {"scores": found["results"], "samples": samples}


BOTH = ["jaxinfer_choose", "jaxinfer_write"]
answers = {
    # Its own choice of a tokenizer is the server's, and it sends token ids.
    "ids": evaluate("local-completions", "/v1/completions", BOTH),
    "batches": evaluate("local-completions", "/v1/completions", BOTH, batch_size=2, num_concurrent=2),
    "texts": evaluate("local-completions", "/v1/completions", BOTH, tokenized_requests=False),
    "chat": evaluate("local-chat-completions", "/v1/chat/completions", BOTH[1:], is_chat=True),
}
# Texts that are longer than the length that it is told, in pieces of two tokens less.
for name, more in {"ids": {}, "batches": {"batch_size": 3, "num_concurrent": 2}}.items():
    rolled = evaluate("local-completions", "/v1/completions", ["jaxinfer_roll"], **{"max_length": 33, **more})
    answers[name]["samples"] |= rolled["samples"]
Path(sys.argv[2]).write_text(json.dumps(answers, default=str))
