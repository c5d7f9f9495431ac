import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, compare_tensors, convert, verify_against
from checkpoints_convert.verify import NUM_TOKENS, _compare_logits


@pytest.mark.slow
def test_conversion_computes_exactly_the_same(checkpoint, tmp_path):
    source = checkpoint("Qwen3ForCausalLM").write()
    convert(source, tmp_path / "native", progress=None)
    report = verify_against(tmp_path / "native", source)
    assert (report.num_tokens, report.max_logit_difference, report.top1_agreement) == (NUM_TOKENS, 0.0, 1.0)
    assert report.mean_kl == pytest.approx(0.0, abs=1e-6)
    assert report.first_diverging is None
    assert list(report.layer_differences) == ["embed", "layers.0.residual", "layers.1.residual", "final_norm"]
    assert compare_tensors(tmp_path / "native", source) == []


def test_one_changed_weight_is_found_with_its_layer(checkpoint):
    source, changed = checkpoint(), checkpoint(name="changed")
    changed.tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.5
    source.write(), changed.write()
    (difference,) = compare_tensors(changed.directory, source.directory)
    assert (difference.name, difference.num_different, difference.size) == ("layers.1.mlp.up_proj.weight", 1, 1536)
    assert difference.max_difference == pytest.approx(0.5, rel=1e-5)
    report = verify_against(changed.directory, source.directory)
    assert report.first_diverging == "layers.1.residual"
    assert report.layer_differences["layers.0.residual"] == 0.0
    assert report.max_logit_difference > 0
    assert report.mean_kl >= 0
    large = max(report.layer_differences.values())
    assert verify_against(changed.directory, source.directory, tolerance=large).first_diverging is None


def test_figures_of_known_logits():
    random = np.random.default_rng(0)
    logits, reference = random.standard_normal((2, 7, 50)) * 3
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (reference, logits))
    found = _compare_logits(jnp.asarray(logits, jnp.float32), jnp.asarray(reference, jnp.float32))
    assert float(found.max_difference) == pytest.approx(np.abs(logits - reference).max(), rel=1e-5)
    assert float(found.kl) == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)
    assert int(found.num_agreeing) == (logits.argmax(-1) == reference.argmax(-1)).sum()


def test_report_covers_every_position(checkpoint):
    source, other = checkpoint(tied=True), checkpoint(tied=True, name="other", seed=1)
    report = verify_against(other.write(), source.write(), token_ids=list(range(70)))
    assert report.num_tokens == 70
    assert report.top1_agreement < 0.2
    assert report.mean_kl > 0


def test_other_configuration_is_refused_by_field(checkpoint):
    source = checkpoint("MistralForCausalLM", sliding_window=None)
    directory = source.write()
    shutil.copytree(directory, directory.with_name("windowed"))
    (directory.with_name("windowed") / "config.json").write_text(
        (directory / "config.json").read_text().replace('"sliding_window": null', '"sliding_window": 100')
    )
    with pytest.raises(CheckpointError, match=r"sliding_windows is \(100, 100\), the reference has \(\)"):
        verify_against(directory.with_name("windowed"), directory)


def test_casts_are_compared_in_float32(checkpoint, tmp_path):
    source = checkpoint().write()
    convert(source, tmp_path / "half", dtype="bfloat16", progress=None)
    report = verify_against(tmp_path / "half", source, dtype="float32")
    assert report.first_diverging == "embed"
    assert 0 < report.layer_differences["embed"] <= 2**-8
    assert len(compare_tensors(tmp_path / "half", source)) == 21
    assert compare_tensors(tmp_path / "half", source, tolerance=0.01) == []


def test_nan_counts_as_diverging(checkpoint):
    source = checkpoint()
    source.tensors["model.norm.weight"][:] = 3e38  # finite, but the logits overflow to infinity and NaN
    directory = source.write()
    report = verify_against(directory, directory)
    assert report.max_logit_difference == np.inf
    assert report.first_diverging == "final_norm"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "list of integers"),
        ([0.5], "list of integers"),
        ([80], r"lie in \[80, 80\]"),
        ([-1, 3], r"lie in \[-1, 3\]"),
    ],
)
def test_bad_token_ids_are_refused(token_ids, message, checkpoint):
    directory = checkpoint().write()
    with pytest.raises(ValueError, match=message):
        verify_against(directory, directory, token_ids=token_ids)
