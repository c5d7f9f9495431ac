"""Names: aliases, what they add, and that a name means the same everywhere."""

import tomllib
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
from huggingface_hub import constants, hf_api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer import LLM
from jaxinfer.api.arguments import checked_options
from jaxinfer.loading import load_model, load_shapes
from jaxinfer.quantization.tree import describe
from jaxinfer.store import (
    Alias,
    StoreError,
    copy_model,
    find_model,
    find_path,
    list_models,
    pull,
    read_alias,
    remove,
    write_alias,
)
from jaxinfer.store.aliases import alias_path, parse_alias, toml_text
from jaxinfer.store.names import parse_hub_name
from jaxinfer.store.pulled import HubName
from tests.store.conftest import REPOSITORY

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("user/model", HubName("user/model")),
        ("gpt2", HubName("gpt2")),
        ("user/model@v1.0", HubName("user/model", "v1.0")),
        ("user/model@refs/pr/3", HubName("user/model", "refs/pr/3")),
        ("user/model:Q4_K_M", HubName("user/model", variant="Q4_K_M")),
        ("user/model:Q4_K_M@v1", HubName("user/model", "v1", "Q4_K_M")),
        ("user/model@v1:Q4_K_M", HubName("user/model", "v1", "Q4_K_M")),
        ("user/model:folder/file.gguf", HubName("user/model", variant="folder/file.gguf")),
        *(
            (name, None)
            for name in ("./model", "/model", "a/b/c", "a b/c", "a/..", "", "model.gguf", "a/b:c:d", "x/y@")
        ),
    ],
)
def test_names_of_the_hub(name, found):
    assert parse_hub_name(name) == found
    if found is not None:
        assert parse_hub_name(str(found)) == found


def test_the_order_of_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "coder", "other"):
        (tmp_path / name).mkdir()
    write_alias(Alias("coder", "demo-draft"))
    assert find_model("demo").path != tmp_path / "demo"  # embedded models are before folders
    assert find_model("./demo").path.resolve() == tmp_path / "demo"
    assert find_model("coder").path.name == "demo-draft"  # and so are aliases
    assert find_model(tmp_path / "coder").path == tmp_path / "coder"
    assert find_model("other").path.name == "other"
    with pytest.raises(FileNotFoundError, match="no such directory"):
        find_model("./missing")


def test_an_alias_applies_wherever_a_model_is_named(model, recwarn):
    sampling = {"temperature": 0.0, "max_tokens": 3, "stop": ["\n\n"]}
    write_alias(Alias("small", model, quantize="int8", draft="ngram", system="Be brief.", sampling=sampling))
    loaded = load_model("small")
    assert describe(loaded.params) == describe(load_model(model, quantize="int8").params) != {}
    assert describe(load_shapes("small")[1])
    assert not describe(load_shapes(model)[1])
    assert (loaded.default_params.temperature, loaded.default_params.max_tokens) == (0.0, 3)
    assert loaded.default_params.stop == ("\n\n",)
    assert describe(load_model("small", quantize="w8a8").params) != describe(loaded.params)
    assert find_path("small") == find_path(model)
    assert "quantize = int8, draft = ngram, which is not applied" in str(recwarn.pop(UserWarning).message)


def test_what_is_given_wins_over_an_alias(model):
    write_alias(Alias("small", model, draft="ngram", system="Be brief."))
    assert checked_options("small", {"num_draft_tokens": 2}).draft == "ngram"
    assert checked_options("small", {"draft": "layers:1"}).draft == "layers:1"
    assert checked_options("small", {"draft": None}).draft is None
    assert checked_options(model, {}).draft is None
    write_alias(Alias("rounded", model, quantize="int8"))
    assert describe(load_shapes("rounded")[1])
    assert not describe(load_shapes("rounded", quantize=None)[1])
    with LLM("small") as llm:
        assert llm.engine.spec.draft.name
        template = llm.tokenizer.apply_chat_template
        user, own = [{"role": "user", "content": "hi"}], [{"role": "system", "content": "Be brief."}]
        assert llm.chat_prompt(user) == list(template([*own, *user]))
        other = [{"role": "system", "content": "x"}, *user]
        assert llm.chat_prompt(other) == list(template(other))


def test_aliases_of_aliases():
    write_alias(Alias("one", "demo", system="first", sampling={"temperature": 0.5, "top_k": 3}))
    write_alias(Alias("two", "one", quantize="int8", sampling={"temperature": 0.2}))
    found = find_model("two")
    assert (found.system, found.options, found.sampling) == (
        "first",
        {"quantize": "int8"},
        {"temperature": 0.2, "top_k": 3},
    )
    for name, model in (("one", "two"), ("self", "self")):
        with pytest.raises(StoreError, match=f"{name} -> .*{name} never come to a model"):
            write_alias(Alias(name, model), overwrite=True)
    alias_path("one").write_text('model = "two"\n')
    with pytest.raises(StoreError, match="one -> two -> one never come to a model"):
        find_model("one")
    assert [model.name for model in list_models()] == ["demo", "demo-draft"]


@pytest.mark.parametrize("name", ["demo", "ngram", "layers:2", "a/b", "a@b", "../x", "", "x.gguf", "-x", "a:b:c", "é"])
def test_names_that_no_alias_may_have(name):
    with pytest.raises(StoreError, match="cannot be an alias"):
        write_alias(Alias(name, "demo"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "demo"\nquantise = "int8"', "'quantise' is no key of an alias: did you mean 'quantize'"),
        ('quantize = "int8"', "model is missing"),
        ('model = "demo"\nsystem = 3', "system must be a text, got 3"),
        ('model = "demo"\n[sampling]\ntemperature = -1', "sampling: temperature must be"),
        ('model = "demo"\n[sampling]\ntemperatur = 1', "did you mean 'temperature'"),
        ("model = ", "is not TOML"),
    ],
)
def test_broken_files_of_aliases(text, message):
    with pytest.raises(StoreError, match=message):
        parse_alias("coder", text, "coder.toml")


def test_settings_that_cannot_be_used_are_refused():
    with pytest.raises(StoreError, match=r"quantize: .*int99"):
        write_alias(Alias("x", "demo", quantize="int99"))
    write_alias(Alias("x", "demo"))
    with pytest.raises(StoreError, match="exists already"):
        write_alias(Alias("x", "demo-draft"))


texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = texts | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(texts, values | st.lists(values, max_size=3)), st.dictionaries(texts, values))
def test_what_is_written_to_toml_is_read_back(plain, table):
    data = {**plain, **({"sampling": table} if table else {})}
    assert tomllib.loads(toml_text(data)) == data


@pytest.mark.slow
def test_what_another_tool_downloaded_is_used_without_a_network(hub, monkeypatch):
    huggingface_hub.snapshot_download(REPOSITORY)
    commit = find_model(REPOSITORY, offline=True).hub.revision
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = find_model(REPOSITORY)
    assert found.hub.revision == commit
    assert (found.path / "config.json").is_file()
    with pytest.raises(ValueError, match="no network"):
        find_model("someone/else")


def test_a_commit_keeps_the_branch_by_which_it_was_pulled(hub):
    commit = pull(REPOSITORY).commit
    pull(f"{REPOSITORY}@{commit}")
    assert find_model(REPOSITORY, fetch=False).path is not None
    assert [model.name for model in list_models() if model.kind == "pulled"] == [REPOSITORY]


def test_variants_are_found_by_any_of_their_names(hub):
    hub.push("someone/gguf", {"tiny-Q4_K_M.gguf": b"GGUF"})
    pull("someone/gguf:Q4_K_M")
    for name in ("q4_k_m", "tiny-Q4_K_M.gguf", "tiny-q4_k_m"):
        assert find_model(f"someone/gguf:{name}", fetch=False).path is not None
        pull(f"someone/gguf:{name}")
    assert [model.name for model in list_models() if model.kind == "pulled"] == ["someone/gguf:Q4_K_M"]


def test_an_alias_of_a_commit_is_of_the_hub_beside_a_folder_of_its_name(hub, tmp_path, monkeypatch):
    path = pull(REPOSITORY).path
    copy_model(REPOSITORY, "tiny")
    (tmp_path / REPOSITORY).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("tiny").path == path


def test_tables_within_sampling_are_copied_and_broken_aliases_can_be_removed(recwarn):
    write_alias(Alias("one", "demo", sampling={"logit_bias": {5: 1.0}, "temperature": 0.5}))
    copy_model("one", "two")
    assert find_model("two").sampling == {"logit_bias": {"5": 1.0}, "temperature": 0.5}
    alias_path("two").write_text("no TOML")
    assert "one" in [model.name for model in list_models()]
    assert "jaxinfer rm two removes it" in str(recwarn.pop(UserWarning).message)
    assert remove("two").removed == ("two",)


def test_aliases_that_are_written_at_once_are_whole():
    def write(number):
        for _ in range(20):
            write_alias(Alias("one", "demo", system=str(number) * 200), overwrite=True)
            assert len(find_model("one").system) == 200

    with ThreadPoolExecutor(3) as executor:
        list(executor.map(write, range(3)))


def test_a_url_is_no_name_of_the_hub():
    assert parse_hub_name("gs://bucket/model") is None
    assert parse_hub_name("memory://model") is None


def test_a_copy_keeps_its_commit(hub, files):
    first = pull(REPOSITORY)
    alias = copy_model(REPOSITORY, "tiny")
    assert (alias.model, alias.revision) == (REPOSITORY, first.commit)
    hub.push(REPOSITORY, {**files, "LICENSE": b"mine"})
    second = pull(REPOSITORY)
    assert find_model("tiny").path == first.path != second.path
    assert copy_model("tiny", "tiny:2") == Alias("tiny:2", REPOSITORY, first.commit)
    assert read_alias("tiny:2").revision == first.commit
    hub.reset()
    with pytest.raises(StoreError, match="is not here: jaxinfer pull someone/else"):
        copy_model("someone/else", "other")
    assert hub.requested == []
