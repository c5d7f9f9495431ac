"""Head training on a mesh: rows are sharded by axis "data"; the parameters of target and head, and the optimizer's
state, by the rules of `jaxinfer.parallel`, and replicated along "data"."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models import MeshFit, ModelConfig, Params, fit_to_mesh, parameter_shardings
from jaxinfer.parallel import DATA, SEQUENCE, AnyMesh, axis_of, axis_size, shortest


class HeadPlacement:
    """Places of the arrays of a training; without a mesh, the default device.

    Raises ValueError for an axis "sequence", for rows of a step that axis "data" does not divide, and as `check_fit`.
    """

    def __init__(self, mesh: AnyMesh | None, target: ModelConfig | None = None, batch_size: int | None = None):
        self.mesh = mesh
        shape = {} if mesh is None else dict(mesh.shape)
        self.name = ",".join(f"{axis}={size}" for axis, size in shape.items()) or None
        self.num_groups = shape.get(DATA, 1)
        if shape.get(SEQUENCE, 1) > 1:
            raise ValueError(f"mesh={self.name!r}: training shards rows by axis 'data', and none by 'sequence'")
        if batch_size is not None and batch_size % self.num_groups:
            raise ValueError(f"batch_size={batch_size} rows cannot be cut into {self.num_groups} equal parts")
        if mesh is not None and target is not None:
            check_fit(fit_to_mesh(mesh, target))

    def target(self, config: ModelConfig, params: Params) -> Params:
        """The parameters of a target; those on the mesh already are not copied."""
        return params if self.mesh is None else fit_to_mesh(self.mesh, config).place(params)

    def head_shardings(self, config: ModelConfig, params: Params) -> Params | None:
        """Those of a head's parameters, or of some of them. What does not divide is replicated."""
        if self.mesh is None:
            return None
        every = parameter_shardings(self.mesh, config, whole_if_uneven=True)
        return jax.tree_util.tree_map_with_path(lambda path, _: _at(every, path), params)

    def head(self, config: ModelConfig, params: Params) -> Params:
        """The parameters of a head."""
        shardings = self.head_shardings(config, params)
        return params if shardings is None else jax.device_put(params, shardings)

    def rows(self, tree: Any) -> Any:
        """Arrays whose first axis is the rows of a step, also inside of a program. An axis that "data" does not divide
        is replicated."""
        return tree if self.mesh is None else jax.device_put(tree, jax.tree.map(self.row_sharding, tree))

    def row_sharding(self, array: Any) -> NamedSharding:
        """The sharding of an array of rows."""
        size = array.shape[0]
        is_divided = DATA in self._mesh.shape and size and size % self.num_groups == 0
        return NamedSharding(self._mesh, PartitionSpec(DATA) if is_divided else PartitionSpec())

    def of_tokens(self, array: Any) -> Any:
        """An array [B, T, V] of rows, inside of a program: its last axis is sharded as a vocabulary."""
        return array if self.mesh is None else jax.device_put(array, self.token_sharding(array))

    def token_sharding(self, array: Any) -> NamedSharding:
        """The sharding of `of_tokens`."""
        rows = next(iter(self.row_sharding(array).spec), None)
        is_divided = array.shape[-1] % axis_size(self._mesh, "vocab") == 0
        tokens = axis_of(self._mesh, "vocab") if is_divided else None
        return NamedSharding(self._mesh, shortest(PartitionSpec(rows, None, tokens)))

    @property
    def _mesh(self) -> AnyMesh:
        if self.mesh is None:
            raise ValueError("there is no mesh")
        return self.mesh


ONE_DEVICE = HeadPlacement(None)


def check_fit(fit: MeshFit | None) -> None:
    """Raises ValueError, with the sizes, for a target that its mesh would change in more than the vocabulary's padding:
    the head would be one of other sizes."""
    changes = {} if fit is None else {name: how for name, how in fit.changes.items() if name != "vocab_size"}
    if changes:
        listed = ", ".join(f"{name}: {how}" for name, how in changes.items())
        raise ValueError(f"the mesh does not divide the target ({listed}): choose a smaller axis 'model'")


def state_shardings(state: Any, params: Params) -> Any:
    """Shardings of a training's state: each array that an optimizer keeps for a parameter lies as that does, others are
    replicated. None for parameters that are on no mesh.

    `state` may be shapes alone. What belongs to a parameter has its path at the end of its own, and its shape.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    own = {path: leaf for path, leaf in leaves if isinstance(getattr(leaf, "sharding", None), NamedSharding)}
    if not own:
        return None
    replicated = NamedSharding(next(iter(own.values())).sharding.mesh, PartitionSpec())

    def of(path: Any, leaf: Any) -> NamedSharding:
        parameters = (own.get(path[start:]) for start in range(len(path)))
        like = next((param for param in parameters if param is not None and param.shape == leaf.shape), None)
        return replicated if like is None else like.sharding

    return jax.tree_util.tree_map_with_path(of, state)


def _at(tree: Any, path: Any) -> Any:
    return _at(tree[path[0].key], path[1:]) if path else tree
