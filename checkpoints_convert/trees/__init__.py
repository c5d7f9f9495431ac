"""Trees of other libraries in, (ModelConfig, params) out: Tunix, Gemma in Flax, MaxText.

A tree is nested dicts, an `nnx.State` or an `nnx.Module`. None of the libraries is imported: the names of its arrays
say which one a tree is of.
"""

from checkpoints_convert.trees.gemma import GEMMA
from checkpoints_convert.trees.maxtext import MAXTEXT
from checkpoints_convert.trees.reading import OtherTree, TreeWeight, named_arrays, read_as
from checkpoints_convert.trees.tunix import TUNIX, config_of
from jaxinfer.models import ModelConfig

FORMS = (TUNIX, GEMMA, MAXTEXT)

__all__ = ["FORMS", "OtherTree", "TreeWeight", "config_of", "read_tree"]


def read_tree(tree: object, config: ModelConfig) -> OtherTree | None:
    """The weights of another library's tree under our names; None for a tree that has none of its names, as ours. A
    tree that was read is returned as it is.

    Nothing is computed: a weight is made when it is taken. Raises ValueError for a model that the library's form is not
    known for.
    """
    if isinstance(tree, OtherTree):
        return tree
    arrays = named_arrays(tree)
    counts = {form: sum(form.knows(name) for name in arrays) for form in FORMS}
    form = max(FORMS, key=counts.__getitem__)
    return read_as(form, arrays, config) if counts[form] else None
