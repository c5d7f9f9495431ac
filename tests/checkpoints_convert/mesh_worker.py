"""Loads checkpoints with and without meshes of eight CPU devices, in a process of its own, and prints what differs.

python mesh_worker.py '[{"name": ..., "path": ..., "options": {...}, "quantize": ..., "sizes": [2, 8]}, ...]'
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh

import checkpoints_convert
from checkpoints_convert.load import IN_FLIGHT_BYTES, read_ahead
from jaxinfer.models import fit_to_mesh, parameter_shardings
from jaxinfer.quantization import Selection
from jaxinfer.quantization.tree import is_quantized

AXES = ({"data": 4, "model": 2}, {"model": 4, "data": 2}, {"model": 8})


def load(case: dict, **more):
    read_ahead.__kwdefaults__["limit"] = case.get("limit", IN_FLIGHT_BYTES)
    convert = Selection(case["quantize"]) if "quantize" in case else None
    return checkpoints_convert.load(case["path"], **case.get("options", {}), convert=convert, **more)


def same(a, b) -> bool:
    return (a.shape, a.dtype, np.asarray(a).tobytes()) == (b.shape, b.dtype, np.asarray(b).tobytes())


def compare(config, params, others, mesh) -> dict:
    fit = fit_to_mesh(mesh, config)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: fit.resized(tuple(key.key for key in path), leaf), params, is_leaf=is_quantized
    )
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    placed, other_structure = jax.tree_util.tree_flatten(others)
    wanted = jax.tree.leaves(parameter_shardings(mesh, fit.config, others))
    different = [
        jax.tree_util.keystr(path)
        for (path, leaf), other in zip(leaves, placed, strict=True)
        if (leaf.shape, leaf.dtype, np.asarray(leaf).tobytes())
        != (other.shape, other.dtype, np.asarray(other).tobytes())
    ]
    misplaced = [
        jax.tree_util.keystr(path)
        for (path, _), other, sharding in zip(leaves, placed, wanted, strict=True)
        if not other.sharding.is_equivalent_to(sharding, other.ndim)
    ]
    return {
        "same_structure": structure == other_structure,
        "different": different,
        "misplaced": misplaced,
        "num_cut": sum(not leaf.sharding.is_fully_replicated for leaf in placed),
        "shapes": {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves},
    }


def main() -> None:
    found = {}
    for case in json.loads(sys.argv[1]):
        config, params = load(case)
        for axes in AXES:
            if axes["model"] not in case["sizes"]:
                continue
            mesh = Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))
            try:
                _, others = load(case, mesh=mesh)
            except ValueError as error:
                result = {"error": str(error)}
            else:
                result = compare(config, params, others, mesh)
            found.setdefault(case["name"], {})[str(axes["model"])] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main()
