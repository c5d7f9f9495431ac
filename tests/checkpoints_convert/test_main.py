import json

import pytest

from checkpoints_convert.__main__ import main


def test_converts_and_prints_a_summary(checkpoint, tmp_path, capsys):
    source = checkpoint().write()
    assert main([str(source), str(tmp_path / "native"), "--dtype", "bfloat16", "--verify"]) == 0
    out, err = capsys.readouterr()
    assert "native: LlamaForCausalLM, bfloat16, " in out
    assert "cast: largest relative error 0.003" in out
    assert "error" not in err


def test_json_report(checkpoint, tmp_path, capsys):
    source = checkpoint().write()
    arguments = [str(source), str(tmp_path / "out"), "--to", "huggingface", "--json", "--quiet", "--verify"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["destination"] == str(tmp_path / "out")
    assert report["config"]["architecture"] == "LlamaForCausalLM"
    assert report["problems"] == []
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "exists: choose another" in err
    assert err.count("\n") == 1
    assert main([*arguments, "--overwrite"]) == 0


def test_quiet_prints_nothing(checkpoint, tmp_path, capsys):
    assert main([str(checkpoint().write()), str(tmp_path / "native"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_missing_source_is_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}/none: no such directory, and not the form of a hub id (owner/name)\n"
    )


@pytest.mark.parametrize(
    "arguments", [[], ["a"], ["a", "b", "--dtype", "int4"], ["a", "b", "--to", "gguf"], ["a", "b", "--x"]]
)
def test_usage_errors_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m checkpoints_convert" in capsys.readouterr().err
