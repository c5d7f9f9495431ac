"""TRL's own client of a server that takes adapters, at sys.argv[1], as its async GRPO trainer uses it to send them from
folders below sys.argv[2], one for each version.

The class is that of the file in TRL's package. Importing the package would import torch; the file itself needs
`requests`, a logger of accelerate, and a function that finds `requests`, which stand-ins give.
"""

import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import types

import requests

URL, ROOT = sys.argv[1:]
MAX_STALENESS = 1


def vllm_client():
    """TRL's class `VLLMClient`."""
    stands_in = {
        name: types.ModuleType(name) for name in ("accelerate", "accelerate.logging", "trl", "trl.import_utils")
    }
    stands_in["accelerate.logging"].get_logger = logging.getLogger
    stands_in["trl.import_utils"].is_requests_available = lambda: True
    for name in ("trl.experimental", "trl.experimental.async_grpo"):
        stands_in[name] = types.ModuleType(name)
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        stands_in[name].__path__ = []
    sys.modules |= stands_in
    path = importlib.metadata.distribution("trl").locate_file("trl/experimental/async_grpo/vllm_client.py")
    spec = importlib.util.spec_from_file_location("trl.experimental.async_grpo.vllm_client", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.VLLMClient


client = vllm_client()(URL, server_timeout=30)
client.wait_for_server_ready(poll_interval_s=0.1)
assert client.get_max_model_len() == 256
assert client.get_dtype() == "torch.float32"
info = client.get_server_info()
# What `select_adapter_sync` looks at.
assert info["lora_config"]["max_loras"] >= MAX_STALENESS + 2
assert info["lora_config"]["max_lora_rank"] >= 4
assert info["parallel_config"]["data_parallel_size"] == 1
for version, folder in enumerate(sorted(os.listdir(ROOT)), 1):
    client.pause()
    client.load_lora_adapter(f"policy-v{version}", os.path.join(ROOT, folder))
    client.resume()
    if (stale := version - (MAX_STALENESS + 1)) > 0:
        client.unload_lora_adapter(f"policy-v{stale}")
client.unload_lora_adapter("policy-v0")  # "missing names are not an error"
for name, path, told in (("policy-v3", "x", "Request failed: 400"), ("new", "/etc", "Request failed: 400")):
    message = ""
    try:
        client.load_lora_adapter(name, path)
    except Exception as error:
        message = str(error)
    assert told in message, message

# A rollout, as `AsyncRolloutWorker` of trl/experimental/async_grpo/async_rollout_worker.py asks for it and reads it.
body = {
    "model": f"policy-v{version}",
    "prompt": [5, 17, 29, 41],
    "max_tokens": 24,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "n": 1,
    "return_token_ids": True,
    "logprobs": 0,
    "seed": 2**62 + 12345,
}
choices = [requests.post(f"{URL}/v1/completions", json=body, timeout=60).json()["choices"][0] for _ in range(2)]
rollouts = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
assert rollouts[0] == rollouts[1]
print(json.dumps({"versions": version, "tokens": rollouts[0][0], "logprobs": rollouts[0][1]}))
