"""`jaxinfer fleet simulate`."""

import json

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
TRACE = "conversations:rate=50,turns=2,shared=64,prompt=100,answer=20,requests=200"


def test_simulate(jaxinfer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ("fleet", "simulate", "--trace", TRACE, "--model", str(tmp_path), "--on", "v6e:1x1", "--max-seqs", "8")
    picture = tmp_path / "fleet.png"
    goal = ("--slo-ttft", "20", "--slo-itl", "5", "--chip-price", "2", "--routing", "prefix")
    result = jaxinfer(*arguments, "--replicas", "1..4", *goal, "--json", "--picture", str(picture))
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["replicas_needed"] == told["fleets"][-1]["replicas"]
    assert told["fleets"][-1]["share"] >= 0.99
    assert told["fleets"][-1]["prefix_hits"] > 0.3
    assert told["fleets"][-1]["cost_per_million_tokens"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = jaxinfer(*arguments, "--replicas", "2", "--requests", "50", "--rate", "9")
    assert "50 requests, 9.00 a second" in result.stdout
    assert "note: steps: the step model's constants of v6e" in result.stdout
    assert jaxinfer(*arguments, "--replicas", "4..2").exit_code == 2
