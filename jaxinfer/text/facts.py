"""Facts of a tokenizer.json beside what the library makes of it: checked, worked out once, and kept.

Parsing and checking 12 MB takes over a second, so that the facts of large tokenizers are kept between processes. Their
key is a digest of all that the tokenizer is made of, the library's version, and the sources here: kept facts say that
the same text has passed the same checks.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.kept_files import KeptFiles, key_of, sources_key
from jaxinfer.text.component_checks import steps_of
from jaxinfer.text.files import TokenizerFiles
from jaxinfer.text.length import LengthBounds, length_bounds
from jaxinfer.text.library import check_works

LEAST_CHARS = 2**18  # of a tokenizer.json whose facts are kept
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class TokenizerFacts:
    """Attributes:
    components: normalizer, pre_tokenizer and decoder of tokenizer.json.
    special: the added tokens that it calls special. unknown_id: the unknown token's.
    largest_id: of the model's vocabulary; -1 without tokens.
    is_control_reachable: whether the vocabulary could turn plain text into a control token.
    """

    components: Mapping[str, Any]
    special: tuple[str, ...]
    unknown_id: int | None
    largest_id: int
    is_control_reachable: bool
    bounds: LengthBounds

    def skipped_of(self, added: Mapping[int, tokenizers.AddedToken]) -> frozenset[str]:
        """The special ones of all added tokens: one that was ever special stays so for the library."""
        before = set(self.special)
        return frozenset(token.content for token in added.values() if token.special or token.content in before)

    def control_of(self, added: Mapping[int, tokenizers.AddedToken]) -> dict[int, str]:
        """The control tokens among all added ones, and the unknown token."""
        skipped = self.skipped_of(added)
        return {
            token_id: token.content
            for token_id, token in added.items()
            if token.content in skipped or not _is_plain_text(token.content)
        }


def find_facts(spec: Mapping[str, Any], growth: float, backend: tokenizers.Tokenizer, name: Any) -> TokenizerFacts:
    """The facts of a checked tokenizer.json and the tokenizer of it, with all added tokens; `growth` from `check_spec`.

    Raises ValueError for a tokenizer that panics, and where a control token has the id of another token.
    """
    strips_ends = any(step["type"] == "Strip" and step["stop"] for step in steps_of(spec, "decoder"))
    check_works(backend, name, decodes_each_token=strips_ends)
    model, vocab = spec["model"], spec["model"]["vocab"]
    facts = TokenizerFacts(
        components={kind: spec.get(kind) for kind in ("normalizer", "pre_tokenizer", "decoder")},
        special=tuple(token["content"] for token in spec.get("added_tokens") or () if token["special"]),
        unknown_id=_unknown_id(model),
        largest_id=max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1,
        is_control_reachable=False,
        bounds=length_bounds(backend, spec, growth),
    )
    control = facts.control_of(backend.get_added_tokens_decoder())
    texts = {text: token_id for token_id, text in control.items()}
    _check_ids_apart({id: text for id, text in control.items() if id != facts.unknown_id}, vocab, name)
    return TokenizerFacts(**{**vars(facts), "is_control_reachable": _is_reachable(model, texts)})


def kept_facts(files: TokenizerFiles) -> TokenizerFacts | None:
    """The facts of files that were kept before; None where there are none."""
    kept = _kept(files)
    if kept is None or (content := kept.read(_key(files))) is None:
        return None
    values = json.loads(content)
    bounds = LengthBounds(**values.pop("bounds"))
    return TokenizerFacts(**{**values, "special": tuple(values["special"]), "bounds": bounds})


def has_passed_checks(files: TokenizerFiles) -> bool:
    """True if a tokenizer was made of the same files before, and its facts are kept."""
    return kept_facts(files) is not None


def keep_facts(files: TokenizerFiles, facts: TokenizerFacts) -> None:
    if (kept := _kept(files)) is not None:
        kept.write(_key(files), json.dumps(asdict(facts)).encode())


def _kept(files: TokenizerFiles) -> KeptFiles | None:
    return KeptFiles.of("tokenizers") if len(files.tokenizer_json) >= LEAST_CHARS else None


def _key(files: TokenizerFiles) -> str:
    return key_of("facts of a tokenizer", files.digest, tokenizers.__version__, sources_key(_FOLDER))


def _is_plain_text(content: str) -> bool:
    """True if a non-special added token is only text: white space (also sentencepiece's), or one character."""
    return len(content) == 1 or not content.replace("▁", " ").strip()


def _check_ids_apart(control: Mapping[int, str], vocab: Any, name: Any) -> None:
    """Raises ValueError if a control token has the id of a token of the model's vocabulary: text would become it. The
    library numbers added tokens anew where their ids in the file do not follow the vocabulary."""
    pairs = ((token_id, token) for token, token_id in vocab.items()) if isinstance(vocab, dict) else enumerate(vocab)
    for token_id, entry in pairs:
        if token_id in control and (token := entry if isinstance(entry, str) else entry[0]) != control[token_id]:
            raise ValueError(
                f"{name}: the added token {control[token_id]!r:.80} has the id {token_id} of the token {token!r:.80}"
            )


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    if model.get("unk_id") is not None:
        return model["unk_id"]
    unknown = model.get("unk_token")
    vocab = model.get("vocab")
    return vocab.get(unknown) if isinstance(vocab, dict) and unknown is not None else None


def _is_reachable(model: Mapping[str, Any], control: Mapping[str, int]) -> bool:
    """True if a model's own vocabulary could turn plain text into one of the control tokens."""
    vocab = model.get("vocab") or {}
    own = control.keys() & (vocab.keys() if isinstance(vocab, dict) else {text for text, _ in vocab})
    if not own:
        return False
    if model.get("type") != "BPE" or model.get("ignore_merges"):
        return True
    if any(len(text) == 1 or (model.get("byte_fallback") and text.startswith("<0x")) for text in own):
        return True
    prefix = model.get("continuing_subword_prefix") or ""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ())
    return any(left + right.removeprefix(prefix) in own for left, right in pairs)
