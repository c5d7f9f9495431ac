"""Tunix's own models and its cluster with jaxinfer as the rollout engine (`make test-tunix`, which installs it)."""

import dataclasses
import functools
import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("tunix") is None:
    pytest.skip("google-tunix is not installed: make test-tunix installs it", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import optax
    import qwix
    from flax import nnx
    from jax.sharding import Mesh
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from jaxinfer import LLM
    from jaxinfer.integrations.tunix import JaxinferRollout

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LLAMA = {**SIZES, "vocab_size": 97, "rope_theta": 1_000_000, "norm_eps": 1e-5}
GEMMA = {**SIZES, "num_layers": 7, "num_embed": 97, "sliding_window_size": 6, "param_dtype": jnp.float32}
GEMMA |= {"local_base_frequency": 10_000, "global_base_frequency": 1_000_000}
BY_EMBED = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
MODELS = {
    "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**LLAMA), rngs=nnx.Rngs(0)),
    "llama3-tied": lambda: llama3.Llama3(llama3.ModelConfig(**LLAMA, weight_tying=True), rngs=nnx.Rngs(0)),
    "qwen2": lambda: qwen2.Qwen2(qwen2.ModelConfig(**LLAMA), rngs=nnx.Rngs(0)),
    "qwen3": lambda: qwen3.Qwen3(qwen3.ModelConfig(**LLAMA, use_tied_embedding=True), rngs=nnx.Rngs(0)),
    "qwen3-experts": lambda: qwen3.Qwen3(
        qwen3.ModelConfig(**LLAMA, num_experts=4, num_experts_per_tok=2), rngs=nnx.Rngs(0)
    ),
    "gemma3": lambda: gemma3.Gemma3(gemma3.ModelConfig(**GEMMA, global_scale_factor=8.0), rngs=nnx.Rngs(0)),
    "gemma3-by-embed": lambda: gemma3.Gemma3(
        gemma3.ModelConfig(**{**GEMMA, "num_kv_heads": 4, "query_pre_attn_norm": BY_EMBED}), rngs=nnx.Rngs(0)
    ),
}
LORA = {"module_path": ".*(q_proj|o_proj|gate_proj|down_proj)", "rank": 4, "alpha": 8.0}
ROLLOUT = RolloutConfig(
    max_tokens_to_generate=12,
    temperature=1.0,
    top_p=1.0,
    max_prompt_length=8,
    kv_cache_size=32,
    return_logprobs=True,
)
PROMPTS = ["abc", "hello", "xy", "abc"]


class Letters:
    """Tokens 3 and up are characters."""

    def encode(self, text, **options):
        return [3 + ord(letter) % 90 for letter in text]

    def decode(self, ids, **options):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def random_model(name, seed=0):
    """A model with normal(0, 0.2) for every parameter: norms and the MLP, zero at first, do something too."""
    model, random = MODELS[name](), np.random.default_rng(seed)
    make = lambda leaf: jnp.asarray(random.normal(0, 0.2, leaf.shape), leaf.dtype)  # noqa: E731
    nnx.update(model, jax.tree.map(make, nnx.state(model, nnx.Param)))
    return model


def with_lora(model):
    inputs = {**model.get_model_input(), "rngs": nnx.Rngs(1)}
    return qwix.apply_lora_to_model(model, qwix.LoraProvider(**LORA), **inputs)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_tunix_forward(name):
    model, tokens = random_model(name), np.random.default_rng(1).integers(1, 97, 24)
    length = len(tokens)
    inputs = jnp.asarray(tokens)[None], jnp.arange(length)[None], None, jnp.tril(jnp.ones((1, length, length), bool))
    logits = model(*inputs)[0][0].astype(jnp.float32)
    expected = jax.nn.log_softmax(logits)[jnp.arange(length - 1), tokens[1:]]
    with LLM((model.config, model), max_model_len=64, max_seqs=2) as llm:
        raw = llm.score([tokens.tolist()], use_tqdm=False)[0].raw
    np.testing.assert_allclose(raw, expected, atol=1e-5, rtol=0)
    assert np.ptp(expected) > 0.5  # far from flat


def test_a_theta_that_the_model_does_not_use_is_told():
    config = qwen3.ModelConfig(**{**LLAMA, "rope_theta": 10_000})
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="rope_theta=10000 is not what this model of Tunix 0.1.7 rotates with"):
        LLM((config, model), max_model_len=64, max_seqs=2).close()


def cluster_of(actor, reference, device=0, **options):
    meshes = [Mesh(np.array([own]).reshape(1, 1), ("fsdp", "tp")) for own in jax.devices()]
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: meshes[0], Role.REFERENCE: meshes[0], Role.ROLLOUT: meshes[device]},
        rollout_engine=functools.partial(JaxinferRollout, max_seqs=4, **options),
        training_config=RLTrainingConfig(actor_optimizer=optax.adam(1e-2), eval_every_n_steps=100, max_steps=20),
        rollout_config=ROLLOUT,
    )
    return RLCluster(actor=actor, reference=reference, tokenizer=Letters(), cluster_config=config)


def check_equal(ours, model):
    """Greedy tokens, texts and padded prompts are those of Tunix's own rollout; log-probabilities within 1e-5."""
    cache = CacheConfig(cache_size=32, num_layers=2, num_kv_heads=2, head_dim=8)
    vanilla = VanillaRollout(model, Letters(), cache)
    # Its sampler is greedy without top_p.
    output = ours.generate(PROMPTS, dataclasses.replace(ROLLOUT, temperature=0.0))
    expected = vanilla.generate(PROMPTS, dataclasses.replace(ROLLOUT, temperature=0.0, top_p=None))
    assert [own.tolist() for own in output.tokens] == [own.tolist() for own in expected.tokens]
    assert output.text == expected.text
    np.testing.assert_array_equal(output.left_padded_prompt_tokens, expected.left_padded_prompt_tokens)
    for own, other in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5, rtol=0)
    completions = np.zeros((len(PROMPTS), 12), np.int32)
    for row, own in zip(completions, output.tokens, strict=True):
        row[: len(own)] = own
    completions[0, 5:] = 0  # padded
    prompts = output.left_padded_prompt_tokens
    scores = np.asarray(ours.get_per_token_logps(prompts, completions))
    other = np.asarray(vanilla.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions)))
    np.testing.assert_allclose(scores[completions != 0], other[completions != 0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(scores[0, 5], other[0, 5], atol=1e-5, rtol=0)  # where padding may be the end
    assert not scores[0, 6:].any()
    return [own.tolist() for own in output.tokens]


@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "lora"])
def test_twenty_steps_of_grpo(has_lora):
    actor, reference = (random_model("qwen3") for _ in range(2))
    if has_lora:
        actor, reference = with_lora(actor), with_lora(reference)
    cluster = cluster_of(actor, reference, lora_scale=LORA["alpha"] / LORA["rank"] if has_lora else None)
    ours = cluster.rollout
    before = check_equal(ours, actor)
    seen = []

    def reward(prompts, completions, **more):
        seen.append((len(prompts), tuple(completions)))
        return [float(len(set(text.split()))) for text in completions]

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=2), reward)
    assert learner.should_sync_weights
    learner.train([{"prompts": np.array(["abc", "hello"])} for _ in range(20)])
    assert cluster.global_steps == 20
    assert ours.num_updates == 20
    assert ours.llm.weights_version == ("0" if has_lora else "20")
    assert [count for count, _ in seen] == [4] * 20
    assert len({texts for _, texts in seen}) == 20  # answers are sampled anew at each step, and each apart
    assert check_equal(ours, cluster.actor_trainer.model) != before
    ours.close()
    cluster.close()


def test_the_rollout_has_devices_of_its_own():
    """The trainer is on the first device, the rollout on the second, and generates in a thread of the learner."""
    cluster = cluster_of(random_model("qwen3"), random_model("qwen3"), device=1)
    ours = cluster.rollout
    assert {device for leaf in jax.tree.leaves(ours.llm.params) for device in leaf.devices()} == {jax.devices()[1]}
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=2), lambda prompts, completions, **more: [1.0, 0.0] * 2)
    assert learner.can_enable_async_rollout
    learner.train([{"prompts": np.array(["abc", "hello"])} for _ in range(3)])
    assert (cluster.global_steps, ours.num_updates, ours.llm.weights_version) == (3, 3, "3")
    check_equal(ours, cluster.actor_trainer.model)
    ours.close()
    cluster.close()


def test_lora_needs_its_scale_and_filters_choose_what_is_updated():
    model = with_lora(random_model("qwen3"))
    with pytest.raises(ValueError, match="LoRA pairs of 8 weights: lora_scale=alpha / rank is needed"):
        JaxinferRollout(model, Letters(), None, ROLLOUT)
    ours = JaxinferRollout(model, Letters(), None, ROLLOUT, lora_scale=2.0, max_seqs=4)
    check_equal(ours, model)
    random = np.random.default_rng(5)
    pairs = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), jnp.float32), nnx.state(model, nnx.LoRAParam)
    )
    nnx.update(model, pairs)
    ours.update_params(nnx.state(model, (nnx.LoRAParam,)), (nnx.LoRAParam,))
    check_equal(ours, model)
    nnx.update(model, nnx.state(random_model("qwen3", seed=3), nnx.Param))
    ours.update_params(nnx.state(model))  # everything, as a cluster that offloads its models gives it
    check_equal(ours, model)
    assert (ours.num_updates, ours.llm.weights_version) == (2, "2")
    with pytest.raises(ValueError, match=r"1 of its 2 arrays have no place: layers.0.attn.q_proj.v"):
        ours.update_params({"layers": {0: {"attn": {"q_proj": {"v": jnp.ones(3), "w": jnp.ones((32, 4, 8))}}}}})
    ours.close()
