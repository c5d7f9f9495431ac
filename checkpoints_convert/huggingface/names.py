"""What a checkpoint's tensors are called where that is not what its family calls them: other prefixes."""

from collections.abc import Callable, Iterable

from checkpoints_convert.huggingface.family import Family

Rename = Callable[[str], str]


def embedding_name(family: Family) -> str:
    return _source(family, "embed")[0]


def head_names(family: Family) -> tuple[str, ...]:
    """Names the head of a family has, the usual one first."""
    return _source(family, "lm_head")


def renaming(family: Family, names: Iterable[str]) -> Rename:
    """From the family's names to those of a checkpoint with the tensors `names`, told by the embedding's.

    Names may lack the family's prefix (the bare model), all have one in front of them, or be those of the text part of
    a model of text and images, before Transformers 5 ("language_model.model.") and since ("model.language_model.").
    """
    names = set(names)
    embedding, prefix = embedding_name(family), family.prefix
    bare = embedding.removeprefix(prefix)

    def without(name: str) -> str:
        return name.removeprefix(prefix)

    def nested(name: str) -> str:
        return f"model.language_model.{without(name)}" if name.startswith(prefix) else name

    if embedding in names:
        return lambda name: name
    if bare in names:
        return without
    if nested(embedding) in names:
        return nested
    before = {name.removesuffix(embedding) for name in names if name.endswith(f".{embedding}")}
    if len(before) == 1:
        common = before.pop()
        return lambda name: common + name
    return lambda name: name


def _source(family: Family, target: str) -> tuple[str, ...]:
    return tuple(rule.source for rule in family.tensors if rule.targets == (target,))
