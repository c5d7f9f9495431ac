"""`jaxinfer serve` refuses what cannot be served before it loads anything."""

from typer.testing import CliRunner

from jaxinfer.cli.main import app


def run(*arguments):
    return CliRunner().invoke(app, ["serve", *arguments])


def test_a_public_address_needs_keys():
    found = run("demo", "--host", "0.0.0.0")
    assert found.exit_code == 1
    assert "--api-keys" in found.output


def test_a_file_of_keys_is_read_first(tmp_path):
    found = run("demo", "--api-keys", str(tmp_path / "none"))
    assert found.exit_code == 1
    assert "No such file" in found.output
    (tmp_path / "keys").write_text("short\n")
    found = run("demo", "--api-keys", str(tmp_path / "keys"))
    assert "line 1" in found.output


def test_values_are_checked():
    assert "reasoning" in run("demo", "--reasoning", "loud").output
    assert run("demo", "--port", "70000").exit_code == 2
