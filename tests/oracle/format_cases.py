"""Modules that other libraries quantized, and the weights those libraries make of them.

`make_format_golden.py` writes them and `test_formats_live.py` makes new ones: both need torch. `load` needs none of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "golden" / "formats"


@dataclass
class Case:
    """One module.

    Attributes:
      quantization: of config.json. shape: [N, K]. tensors: by suffix, as raw bytes with their safetensors dtype.
      expected: the library's float32 weight [N, K]. ulps: how far from it ours may be: 0 but where three factors meet.
    """

    name: str
    quantization: dict[str, Any]
    shape: tuple[int, int]
    tensors: dict[str, Any] = field(repr=False)
    expected: Any = field(repr=False)
    ulps: int = 0


def cases(seed: int) -> Iterator[Case]:
    """Cases of every format that a library here can write."""
    import torch

    torch.manual_seed(seed)
    yield from _bitsandbytes()
    yield from _compressed_tensors()
    yield from _transformers()
    yield from _nvfp4()


def save(case: Case) -> Path:
    """Writes golden/formats/NAME.safetensors."""
    from safetensors.torch import save_file

    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{case.name}.safetensors"
    meta = {"quantization": case.quantization, "shape": list(case.shape), "ulps": case.ulps}
    tensors = {f"layer.{suffix}": tensor.contiguous() for suffix, tensor in case.tensors.items()}
    save_file({**tensors, "expected": case.expected.contiguous()}, path, {"case": json.dumps(meta)})
    return path


def found(directory_or_file: Path) -> tuple[Any, np.ndarray, int]:
    """The weight that our reader makes of a written case, the library's weight, and the allowed ulps."""
    from checkpoints_convert.formats import quantization_method
    from checkpoints_convert.safetensors_files import NUMPY_DTYPES, SafetensorsFile

    with SafetensorsFile(directory_or_file) as file:
        meta = json.loads(file.metadata["case"])
        arrays = {}
        for name, entry in file.tensors.items():
            arrays[name] = np.empty(entry.shape, NUMPY_DTYPES[entry.dtype])
            file.read_into(name, 0, arrays[name].reshape(-1).view(np.uint8).data)
        headers = {
            name.removeprefix("layer."): (entry.dtype, entry.shape)
            for name, entry in file.tensors.items()
            if name != "expected"
        }
    method = quantization_method({"quantization_config": meta["quantization"]})
    assert method is not None
    reader = method.reader("layer", tuple(meta["shape"]), headers, "Linear")
    assert reader is not None
    assert set(reader.suffixes) == set(headers)
    weight = reader.read({suffix: arrays[f"layer.{suffix}"] for suffix in reader.suffixes})
    return weight, arrays["expected"], meta["ulps"]


def assert_equal(path: Path) -> None:
    """Every value of the dequantized weight has the library's bits, or is within the stated ulps."""
    weight, expected, ulps = found(path)
    array = weight if isinstance(weight, np.ndarray) else np.asarray(weight.dequantize())
    ours, theirs = np.ascontiguousarray(array.T), expected.astype(np.float32)
    if ulps == 0:
        assert ours.tobytes() == theirs.tobytes(), path.stem
    else:
        assert (np.abs(ours - theirs) <= ulps * np.spacing(np.abs(theirs))).all(), path.stem


def _weight(outputs: int, inputs: int):
    import torch

    return torch.randn(outputs, inputs) * 0.02


def _bitsandbytes() -> Iterator[Case]:
    import bitsandbytes.functional as bnb
    import torch
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    for kind in ("nf4", "fp4"):
        # 100 x 192 in blocks of 64 is 300 absmax: two blocks of 256 where they are nested. 96 is one block and a half.
        for nested, shape in ((False, (24, 128)), (True, (100, 192)), (True, (20, 96)), (False, (7, 33))):
            packed, state = bnb.quantize_4bit(
                _weight(*shape), blocksize=64, compress_statistics=nested, quant_type=kind, quant_storage=torch.uint8
            )
            absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
            # Its kernel for CPUs (0.50.2) lets blocks end with the row, where its quantizer and its other kernels let
            # them run on; so here its implementation for all devices.
            expected = _dequantize_4bit_compute(packed.view(-1), absmax, state.code, 64, shape, torch.float32)
            if shape[1] % 64 == 0:
                assert torch.equal(expected, bnb.dequantize_4bit(packed, state))
            tensors = {"weight": packed} | {f"weight.{key}": t for key, t in state.as_dict(packed=True).items()}
            name = f"bitsandbytes-{kind}{'-nested' if nested else ''}-{shape[0]}x{shape[1]}"
            yield Case(name, {"quant_method": "bitsandbytes", "load_in_4bit": True}, shape, tensors, expected)
    values, rows, _ = bnb.int8_vectorwise_quant(_weight(24, 128).half())
    tensors = {"weight": values, "SCB": rows, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    # (q * SCB) * (1 / 127) there, q * (SCB / 127) here: each rounds twice.
    yield Case(
        "bitsandbytes-int8",
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        (24, 128),
        tensors,
        bnb.int8_vectorwise_dequant(values, rows),
        ulps=2,
    )


_PACKED = {
    f"packed-{bits}bit{'' if symmetric else '-asym'}-{strategy}": ("pack-quantized", {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": 32 if strategy == "group" else None,
    })
    for bits in (2, 3, 4, 5, 8)
    for symmetric, strategy in ((True, "group"), (False, "group"), (True, "channel"))
}  # fmt: skip
_PLAIN = {
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8-asym": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
    "naive-fp8": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}


def _compressed_tensors() -> Iterator[Case]:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    shape = (20, 96)
    for name, (form, fields) in {**_PACKED, **_PLAIN}.items():
        args = QuantizationArgs(**fields)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        weight = _weight(*shape)
        state = {"weight": weight, **_scales(weight, fields)}
        compressor = BaseCompressor.get_value_from_registry(form)
        tensors = compressor.compress(state, scheme)
        expected = compressor.decompress(tensors, scheme)["weight"]
        assert expected.dtype == torch.float32
        group = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
        quantization = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
        yield Case(f"compressed-tensors-{name}", quantization, shape, tensors, expected)


def _scales(weight: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Scales of the largest value that shares a scale; zeros for asymmetric ones."""
    import torch

    strategy, bits = fields["strategy"], fields["num_bits"]
    outputs, inputs = weight.shape
    bn, bk = {
        "tensor": (outputs, inputs), "channel": (1, inputs), "group": (1, fields.get("group_size")),
        "block": fields.get("block_structure"),
    }[strategy]  # fmt: skip
    rows, columns = -(-outputs // bn), -(-inputs // bk)
    padded = torch.nn.functional.pad(weight, (0, columns * bk - inputs, 0, rows * bn - outputs))
    parts = padded.reshape(rows, bn, columns, bk).transpose(1, 2).reshape(rows, columns, -1)
    if fields.get("symmetric", True):
        scale = parts.abs().amax(-1) / (448 if fields["type"] == "float" else (2**bits - 1) / 2)
        return {"weight_scale": scale.reshape(1) if strategy == "tensor" else scale}
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-(2 ** (bits - 1)) - low / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def _transformers() -> Iterator[Case]:
    """FP8 in blocks, and AWQ through compressed-tensors' converter."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = _weight(32, 64)
    scale = weight.reshape(2, 16, 2, 32).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
    tensors = {"weight": (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    expected = Fp8Dequantize(None)._dequantize_one(tensors["weight"], scale, torch.float32)
    yield Case(
        "transformers-fp8-block", {"quant_method": "fp8", "weight_block_size": [16, 32]}, (32, 64), tensors, expected
    )

    words = torch.iinfo(torch.int32)
    tensors = {
        "qweight": torch.randint(words.min, words.max, (96, 3), dtype=torch.int32),
        "qzeros": torch.randint(words.min, words.max, (3, 3), dtype=torch.int32),
        "scales": torch.rand(3, 24),
    }
    converted = AutoAWQConverter(group_size=32, ignore=[]).process({f"layer.{key}": t for key, t in tensors.items()})
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(
        {key.removeprefix("layer."): t for key, t in converted.items()},
        QuantizationScheme(targets=["Linear"], weights=args),
    )["weight"]
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    yield Case("autoawq-gemm", quantization, (24, 96), tensors, expected)


def _nvfp4() -> Iterator[Case]:
    """compressed-tensors' own, and ModelOpt's through its converter, which inverts the scale of the tensor."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    shape = (20, 96)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")

    def expected(tensors: dict[str, Any]) -> Any:
        values = unpack_fp4_from_uint8(tensors["weight_packed"], *shape, dtype=torch.float32)
        scale, of_tensor = tensors["weight_scale"].float(), tensors["weight_global_scale"]
        found = dequantize(values, scale, args=scheme.weights, dtype=torch.float32, global_scale=of_tensor)
        assert torch.equal(compressor.decompress(tensors, scheme)["weight"], found.bfloat16())
        return found

    weight = _weight(*shape)
    of_tensor = (448 * 6 / weight.abs().max()).reshape(1)
    scale = (weight.reshape(20, 6, 16).abs().amax(-1) / 6 * of_tensor).to(torch.float8_e4m3fn).float()
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": of_tensor}
    tensors = compressor.compress(state, scheme)
    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}
    quantization = {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group},
    }  # fmt: skip
    yield Case("compressed-tensors-nvfp4", quantization, shape, tensors, expected(tensors))

    modelopt = {
        "weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"],
        "weight_scale_2": (weight.abs().max() / (448 * 6)).reshape(()), "input_scale": torch.tensor(0.25),
    }  # fmt: skip
    converter = ModelOptNvfp4Converter(targets=["Linear", "re:layer"])
    converted = converter.process({f"layer.{suffix}": tensor for suffix, tensor in modelopt.items()})
    found = {key.removeprefix("layer."): tensor for key, tensor in converted.items()}
    found["weight_global_scale"] = found["weight_global_scale"].reshape(1)
    # weight_scale * weight_scale_2 here, weight_scale / (1 / weight_scale_2) there: two more roundings.
    yield Case(
        "modelopt-nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, shape, modelopt, expected(found), ulps=3
    )
