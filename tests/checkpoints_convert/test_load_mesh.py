"""Loading onto meshes of 2, 4 and 8 devices: the same bits as without, each leaf where the rules put it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import checkpoints_convert
from checkpoints_convert import CheckpointError, load
from tests.checkpoints_convert.family_files import Files, one_by_one, read
from tests.checkpoints_convert.formats import tiny
from tests.checkpoints_convert.gguf.gguf_models import write_model

HERE = Path(__file__).parent
D, F, V, HEADS, HEAD_DIM = 64, 128, 96, 8, 8
FAMILIES = ["llama", "gemma", "phi3", "gpt_neox", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
FORMATS = ["gptq-v1", "gptq-act-order", "awq", "nf4-nested", "fp8-block"]


def eight_heads(kv_heads: int) -> Files:
    random = np.random.default_rng(kv_heads)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        sizes = {"q": HEADS, "k": kv_heads, "v": kv_heads}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (n * HEAD_DIM, D) for name, n in sizes.items()}
        shapes |= {f"{prefix}.self_attn.o_proj.weight": (D, HEADS * HEAD_DIM), f"{prefix}.mlp.down_proj.weight": (D, F)}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    config = {**tiny.CONFIG, "vocab_size": V, "num_attention_heads": HEADS, "num_key_value_heads": kv_heads}
    config |= {"hidden_size": D, "intermediate_size": F, "head_dim": HEAD_DIM}
    return Files(config, {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def compared(tmp_path_factory, make_checkpoint, pytestconfig):
    """Results of a process with eight devices, by checkpoint and size of the mesh's axis; without --slow of `QUICK`."""
    root = tmp_path_factory.mktemp("mesh")
    cases = [{"name": name, "path": read(name).write(root / name)} for name in FAMILIES]
    cases.append({"name": "experts one by one", "path": one_by_one(read("mixtral")).write(root / "each")})
    for kv_heads in (2, 8):
        cases.append({"name": f"{kv_heads} of 8", "path": eight_heads(kv_heads).write(root / f"kv{kv_heads}")})
    cases += [{"name": name, "path": tiny.tiny(name).write(root / name)} for name in FORMATS]
    native = root / "native"
    checkpoints_convert.convert(root / "kv2", native, progress=None)
    cases.append({"name": "native", "path": native})
    quantized = root / "native-gptq"
    checkpoints_convert.convert(root / "gptq-v1", quantized, progress=None)
    cases.append({"name": "native, quantized", "path": quantized})
    gguf = write_model(root / "model.gguf", make_checkpoint(root / "source"))
    cases.append({"name": "gguf", "path": gguf})
    cases.append({"name": "as bfloat16", "path": root / "kv2", "options": {"dtype": "bfloat16"}})
    cases.append({"name": "int8 on the way", "path": root / "kv8", "quantize": "int8"})
    cases.append({"name": "int4 on the way", "path": root / "kv8", "quantize": "int4-g32"})
    cases.append({"name": "part by part", "path": root / "kv8", "limit": 5000})
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1])}
    is_slow = pytestconfig.getoption("--slow")
    cases = [
        {**case, "path": str(case["path"]), "sizes": (2, 4, 8) if is_slow or case["name"] == "2 of 8" else (2, 8)}
        for case in cases
        if is_slow or case["name"] in QUICK
    ]
    command = [sys.executable, str(HERE / "mesh_worker.py"), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


NAMES = [*FAMILIES, "experts one by one", "2 of 8", "8 of 8", *FORMATS, "native", "native, quantized", "gguf",
         "as bfloat16", "int8 on the way", "int4 on the way", "part by part"]  # fmt: skip
ON_EIGHT = {"2 of 8", "8 of 8", "native", "as bfloat16", "int8 on the way", "int4 on the way", "part by part"}


# Of each way to be cut: dense, experts, latent attention, heads fewer than devices, formats, kept and made on the way.
QUICK = ("deepseek_v3", "gpt_oss", "2 of 8", "awq", "nf4-nested", "gguf", "int4 on the way", "part by part")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)), 8])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_same_bits_where_the_rules_put_them(compared, name, size):
    found = compared[name][str(size)]
    if "error" in found:
        assert (size, name in ON_EIGHT) == (8, False)
        reasons = ("num_experts=4 cannot be cut into 8 equal parts", "o_proj.weight: quantized inputs lie in blocks")
        assert any(reason in found["error"] for reason in reasons)
        return
    assert found["same_structure"]
    assert (found["different"], found["misplaced"]) == ([], [])
    assert found["num_cut"] > 10


@pytest.mark.slow
def test_key_value_heads_fewer_than_devices_are_repeated(compared):
    name = "['layers']['0']['attention']['k_proj']['weight']"
    widths = [compared["2 of 8"][size]["shapes"][name][1] for size in ("2", "4", "8")]
    assert widths == [2 * HEAD_DIM, 4 * HEAD_DIM, 8 * HEAD_DIM]


def two(axis: str = "model") -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), (axis,))


def test_what_the_mesh_cannot_cut_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    from checkpoints_convert.safetensors_files import SafetensorsFile

    directory = read("mixtral").write(tmp_path)
    asked = []
    monkeypatch.setattr(SafetensorsFile, "read_into", lambda *arguments: asked.append(arguments))
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    monkeypatch.setattr(type(mesh), "shape", property(lambda self: {"model": 3}))
    with pytest.raises(ValueError, match="num_experts=4 cannot be cut into 3 equal parts"):
        load(directory, mesh=mesh)
    assert not asked


def test_an_error_on_the_way_names_file_and_tensor(checkpoint):
    source = checkpoint()
    source.tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*1\.mlp\.up_proj\.weight': 1"):
        load(source.write(), mesh=two())


def test_buffers_of_the_parts_are_the_devices_own(checkpoint):
    """On a CPU device what was read is not copied again."""
    params = load(checkpoint().write(), mesh=two())[1]
    shards = params["layers"]["0"]["mlp"]["down_proj"]["weight"].addressable_shards
    assert [shard.index[0].indices(48)[:2] for shard in shards] == [(0, 24), (24, 48)]
    assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == 2
