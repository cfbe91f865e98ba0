"""Files of a checkpoint: missing, stray, damaged, quantised, unknown, and what the build says about them.

Over 300 lines because it is a list of independent cases, each short and found by its case id.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file

from mtp_exporter import BuildOptions, build
from mtp_exporter.inspecting.inspect import inspect_checkpoint
from tests.exporter.plain_graph import weight_regions
from tests.fixtures.checkpoints import (
    add_tensor,
    drop_tensors,
    edit_config,
    edit_tensor,
    markov_checkpoint,
    random_checkpoint,
    read_tensors,
    rename_tensor,
)
from tests.oracles.float64 import Oracle, load_checkpoint
from tests.support import (
    build_bundle,
    build_refused,
    command_refused,
    copy_of,
    generate,
    ids_of,
    leftovers,
    load_model,
    refused,
    run_command,
)

PROMPT = [5, 6, 7]
PREFIX = "model.language_model."
INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-{i:05d}-of-00002.safetensors" for i in (1, 2))


def by_five(token: int) -> int:
    return (token + 5) % 64


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in two shards; the second one holds the head and nothing else."""
    return random_checkpoint(tmp_path_factory.mktemp("sharded") / "model", seed=1, shards=2)


@pytest.fixture(scope="module")
def reference(sharded: Path) -> list[int]:
    """The oracle's first ids of `sharded`."""
    return Oracle(load_checkpoint(sharded)).greedy(PROMPT, 8)


@pytest.fixture(scope="module")
def bundle(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `sharded`, never to be changed."""
    return build_bundle(sharded, tmp_path_factory.mktemp("bundle") / "out")


# ------------------------------------------------------------------------------- LD-01: shards


def test_the_undamaged_checkpoint_builds_and_equals_the_oracle(bundle: Path, reference: list[int]) -> None:
    """LD-01, LD-05, LD-30: the control of every refusal below."""
    assert ids_of(bundle, PROMPT, 8) == reference


def test_a_missing_head_shard_is_refused_by_name(sharded: Path, tmp_path: Path) -> None:
    """LD-01: the sentence names the file, the index, the number of tensors and one of them."""
    checkpoint = copy_of(sharded, tmp_path / "model")
    (checkpoint / SECOND).unlink()
    build_refused(checkpoint, tmp_path / "out", SECOND, INDEX, "15 tensors", "'mtp.fc.weight'", "Fetch")
    report = inspect_checkpoint(checkpoint)
    assert not report["can_build"]
    assert report["files"]["missing"] == [{"file": SECOND, "tensors": 15}]


def test_without_its_head_shard_the_target_builds_only_when_asked(
    sharded: Path, reference: list[int], tmp_path: Path
) -> None:
    """LD-01: a build without the head succeeds if, and only if, the user asked for it."""
    checkpoint = copy_of(sharded, tmp_path / "model")
    (checkpoint / SECOND).unlink()
    out = build_bundle(checkpoint, tmp_path / "out", mtp=False)
    assert ids_of(out, PROMPT, 8) == reference
    with refused("without an MTP head"):
        generate(out, PROMPT, 8, 1)


@pytest.mark.parametrize("mtp", [True, False])
def test_a_missing_target_shard_is_refused_with_and_without_the_head(sharded: Path, tmp_path: Path, mtp: bool) -> None:
    """LD-01: no option makes up for a missing part of the target."""
    checkpoint = copy_of(sharded, tmp_path / "model")
    (checkpoint / FIRST).unlink()
    build_refused(checkpoint, tmp_path / "out", FIRST, INDEX, "tensors", mtp=mtp)


def test_a_tensor_that_only_the_index_knows_is_refused(sharded: Path, tmp_path: Path) -> None:
    """LD-01: the index is checked against the content of a file that is there, too."""
    checkpoint = copy_of(sharded, tmp_path / "model")
    tensors = load_file(checkpoint / SECOND)
    del tensors["mtp.norm.weight"]
    save_file(tensors, checkpoint / SECOND)
    build_refused(checkpoint, tmp_path / "out", SECOND, "1 of 15", "'mtp.norm.weight'", INDEX)


def test_the_command_refuses_in_one_line_and_leaves_no_bundle(sharded: Path, tmp_path: Path) -> None:
    """LD-01, LD-40: exit code 1, no traceback, and `mtp-run` finds nothing to open."""
    checkpoint = copy_of(sharded, tmp_path / "model")
    (checkpoint / SECOND).unlink()
    out = tmp_path / "out"
    command_refused(run_command("mtp-export", "build", "--model", checkpoint, "--out", out), SECOND, "Fetch")
    assert leftovers(out) == []
    command_refused(run_command("mtp-run", "generate", out, "--prompt-ids", "5"), "does not exist")


# ------------------------------------------------------------------------- LD-04: stray files


@pytest.fixture
def strays(tmp_path: Path) -> Path:
    """A chain of t + 1 in two shards beside single files that encode t + 5."""
    checkpoint = markov_checkpoint(tmp_path / "model", shards=2)
    other = markov_checkpoint(tmp_path / "other", target=by_five)
    for name in ("model.safetensors", "consolidated.safetensors"):
        shutil.copyfile(other / "model.safetensors", checkpoint / name)
    return checkpoint


def test_with_an_index_only_its_files_are_read(strays: Path, tmp_path: Path) -> None:
    """LD-04: stray single files beside the shards change nothing; the control reads them."""
    out = build_bundle(strays, tmp_path / "out")
    assert ids_of(out, [5], 5, 3) == [6, 7, 8, 9, 10]
    control = build_bundle(tmp_path / "other", tmp_path / "control")
    assert ids_of(control, [5], 5, 3) == [10, 15, 20, 25, 30]
    assert inspect_checkpoint(strays)["files"]["not_in_index"] == ["consolidated.safetensors", "model.safetensors"]


def test_several_files_without_an_index_are_refused_with_a_list(strays: Path, tmp_path: Path) -> None:
    """LD-04: without an index nothing says which candidate counts."""
    (strays / INDEX).unlink()
    build_refused(strays, tmp_path / "out", "consolidated.safetensors", "model.safetensors", FIRST, SECOND)


def test_a_tensor_in_two_shards_is_read_from_the_shard_that_the_index_names(tmp_path: Path) -> None:
    """LD-04: a stale copy in a later shard never wins over the index; a refusal would do as well."""
    checkpoint = markov_checkpoint(tmp_path / "model", shards=2)
    other = read_tensors(markov_checkpoint(tmp_path / "other", target=by_five))
    assert json.loads((checkpoint / INDEX).read_text())["weight_map"]["lm_head.weight"] == FIRST
    tensors = load_file(checkpoint / SECOND)
    save_file({**tensors, "lm_head.weight": other["lm_head.weight"]}, checkpoint / SECOND)
    assert ids_of(build_bundle(checkpoint, tmp_path / "out"), [5], 3) == [6, 7, 8]


# ----------------------------------------------------------------------- LD-05: damaged files


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "the last 100 bytes cut": (cut(-100), ("is cut short", "its header describes")),
    "cut to four bytes": (cut(4), ("is cut short", "has 4 bytes")),
    "a pointer to a large file": (
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:".ljust(129, b"0") + b"\n",
        ("is not a safetensors file", "130 bytes", "pointer"),
    ),
    "16 bytes too many": (lambda content: content + bytes(16), ("is longer than its header says",)),
    "no bytes": (cut(0), ("is cut short", "has 0 bytes")),
    "a header cut in the middle": (cut(200), ("is not a safetensors file", "200 bytes")),
    "a header that is a JSON list": (
        lambda _: (2).to_bytes(8, "little") + b"[]",
        ("is not a safetensors file", "10 bytes"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_shard_is_refused_with_its_name_and_sizes(
    sharded: Path, tmp_path: Path, damage: tuple[Callable[[bytes], bytes], tuple[str, ...]]
) -> None:
    """LD-05: never the library's own message about headers."""
    change, parts = damage
    checkpoint = copy_of(sharded, tmp_path / "model")
    path = checkpoint / SECOND
    before = path.read_bytes()
    path.write_bytes(change(before))
    build_refused(checkpoint, tmp_path / "out", str(path), *parts, "etch")
    if "its header describes" in parts:
        build_refused(checkpoint, tmp_path / "out", f"{len(before) - 100} bytes", f"describes {len(before)}")


def test_a_tensor_with_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """LD-05: a damaged value is found by name although the file is whole."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    edit_tensor(checkpoint, "mtp.fc.weight", lambda array: np.where(array == array[0, 3], np.nan, array))
    build_refused(checkpoint, tmp_path / "out", "'mtp.fc.weight'", "model.safetensors", "NaN or infinity")


# ------------------------------------------------------------- LD-06, LD-26, LD-31: every tensor


def test_an_announced_head_without_tensors_is_refused(tmp_path: Path) -> None:
    """LD-06: the configuration announces a layer that the files do not hold."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, mtp=False)
    parts = ("declares 1 MTP layer", "0 of 15 tensors", "first missing: 'mtp.fc.weight'", "--no-mtp")
    build_refused(checkpoint, tmp_path / "out", *parts)
    report = inspect_checkpoint(checkpoint)
    assert (report["mtp"]["tensors_found"], report["mtp"]["tensors_expected"]) == (0, 15)
    out = build_bundle(checkpoint, tmp_path / "plain", mtp=False)
    assert ids_of(out, PROMPT, 8) == Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 8)


HEAD_TENSORS = [
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.self_attn.k_norm.weight",
    "mtp.layers.0.mlp.down_proj.weight",
]


@pytest.mark.parametrize("name", HEAD_TENSORS)
@pytest.mark.parametrize("declared", [1, None])
def test_a_head_that_lacks_one_tensor_is_refused_by_its_name(tmp_path: Path, name: str, declared: int | None) -> None:
    """LD-06: 14 of 15 tensors are no head, whether the configuration announces one or says nothing."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, mtp_num_hidden_layers=declared)
    drop_tensors(checkpoint, lambda other: other == name)
    build_refused(checkpoint, tmp_path / "out", "14 of 15 tensors", f"'{name}'")


def test_a_head_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    """LD-06: the reverse contradiction, tensors there and zero layers announced."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, mtp_num_hidden_layers=0)
    build_refused(checkpoint, tmp_path / "out", "mtp_num_hidden_layers = 0", "15 of the head's 15")
    control = random_checkpoint(tmp_path / "without", seed=1, mtp_num_hidden_layers=0, mtp=False)
    with refused("without an MTP head"):
        generate(build_bundle(control, tmp_path / "out"), PROMPT, 4, 2)


def test_renamed_embedding_and_head_are_refused_with_both_names(tmp_path: Path) -> None:
    """LD-26: a name that no rule knows never leaves a matrix at its initial value."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    rename_tensor(checkpoint, f"{PREFIX}embed_tokens.weight", "embed.weight")
    build_refused(checkpoint, tmp_path / "out", f"'{PREFIX}embed_tokens.weight'", "'embed.weight'")
    checkpoint = random_checkpoint(tmp_path / "second", seed=1)
    rename_tensor(checkpoint, "lm_head.weight", "head.weight")
    build_refused(checkpoint, tmp_path / "out", "'lm_head.weight'")


@pytest.mark.parametrize("name", ["mtp.0.main_norm.weight", "mtp.layers.1.input_layernorm.weight", "extra.weight"])
def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """LD-26: every tensor of a file is used or listed as ignored."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    add_tensor(checkpoint, name, np.zeros(40, np.float32))
    build_refused(checkpoint, tmp_path / "out", "holds 1 that no rule knows", f"'{name}'")


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    """LD-26: right name, wrong matrix."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    add_tensor(checkpoint, "mtp.fc.weight", np.zeros((40, 40), np.float32))
    build_refused(checkpoint, tmp_path / "out", "'mtp.fc.weight'", "[40, 40]", "[40, 80]")


def test_every_parameter_was_filled_exactly_once(tmp_path: Path) -> None:
    """LD-26: each region of the weight file is one checkpoint tensor, and each tensor has one region."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    out = build_bundle(checkpoint, tmp_path / "out")
    regions = {region[1:] for region in weight_regions(out / "graphs/backbone.onnx", out / "graphs/mtp.onnx")}
    data = (out / "graphs/weights.data").read_bytes()
    stored = sorted(data[offset : offset + size] for offset, size, _ in regions)
    assert stored == sorted(gain_bytes(checkpoint).values())
    assert len(set(stored)) == len(stored), "two tensors are equal, so this test could not tell them apart"
    edit_tensor(checkpoint, "mtp.norm.weight", lambda array: array + 0.5)
    assert stored != sorted(gain_bytes(checkpoint).values()), "this test cannot see a tensor that was not filled"


def gain_bytes(checkpoint: Path) -> dict[str, bytes]:
    """The float32 bytes of every tensor as the graphs need it: zero-centred norms as 1 + w."""
    found = {}
    for name, array in read_tensors(checkpoint).items():
        centred = "norm" in name and not name.endswith("linear_attn.norm.weight")
        found[name] = (np.float32(1) + array if centred else array).astype(np.float32).tobytes()
    return found


def test_vision_tensors_are_ignored_in_one_line_and_images_refused(tmp_path: Path) -> None:
    """LD-31: a text build of a checkpoint with a vision tower."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    for i in range(3):
        add_tensor(checkpoint, f"model.visual.blocks.{i}.norm1.weight", np.ones(24, np.float32))
    notes: list[str] = []
    out = build_bundle(checkpoint, tmp_path / "out", notes=notes)
    assert [note for note in notes if "ignored" in note] == ["ignored 3 vision tensors (text only)"]
    model = load_model(out)
    assert ids_of(model, PROMPT, 8) == Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 8)
    image = {"role": "user", "content": [{"type": "image", "image": "cat.png"}]}
    with refused("Images", "not supported"):
        model.complete(messages=[image])


def test_a_misspelt_tensor_is_refused_with_the_missing_and_the_unknown_name(tmp_path: Path) -> None:
    """LD-31: tolerance for vision tensors hides no gap of the target."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    add_tensor(checkpoint, "model.visual.merger.norm.weight", np.ones(24, np.float32))
    right, wrong = (f"{PREFIX}layers.0.mlp.gate_{end}.weight" for end in ("proj", "prj"))
    rename_tensor(checkpoint, right, wrong)
    build_refused(checkpoint, tmp_path / "out", f"'{right}'", f"'{wrong}'")


# ---------------------------------------------------------------------- LD-27: quantised files


# ------------------------------------------------------------------- LD-30: the head's own graph


def test_a_bundle_whose_head_was_deleted_is_refused_for_every_draft_length(bundle: Path, tmp_path: Path) -> None:
    """LD-30: no silent fall back to plain decoding."""
    damaged = copy_of(bundle, tmp_path / "out")
    (damaged / "graphs/mtp.onnx").unlink()
    with refused("mtp.onnx is missing"):
        generate(damaged, PROMPT, 4, 2)


def test_a_bundle_whose_head_was_cut_short_is_refused(bundle: Path, tmp_path: Path) -> None:
    """LD-30: the file's size stands in the manifest."""
    damaged = copy_of(bundle, tmp_path / "out")
    path = damaged / "graphs/mtp.onnx"
    path.write_bytes(path.read_bytes()[:-100])
    with refused("mtp.onnx", f"has {path.stat().st_size} bytes"):
        generate(damaged, PROMPT, 4, 2)


def test_a_bundle_with_the_head_of_another_model_is_refused(bundle: Path, tmp_path: Path) -> None:
    """LD-30: a file of the same name that belongs elsewhere, and one of the same size."""
    other = build_bundle(markov_checkpoint(tmp_path / "model"), tmp_path / "other")
    damaged = copy_of(bundle, tmp_path / "out")
    path = damaged / "graphs/mtp.onnx"
    shutil.copyfile(other / "graphs/mtp.onnx", path)
    with refused("mtp.onnx"):
        generate(damaged, PROMPT, 4, 2)
    same_size = bytearray((bundle / "graphs/mtp.onnx").read_bytes())
    same_size[len(same_size) // 2] ^= 1
    path.write_bytes(bytes(same_size))
    with refused("mtp.onnx was changed"):
        generate(damaged, PROMPT, 4, 2)


# ---------------------------------------------------------------------------- LD-38: mixed dtypes


def test_float32_decay_in_a_bfloat16_checkpoint_keeps_its_bits(tmp_path: Path) -> None:
    """LD-38: A_log is neither rounded on the way in nor in the graph, and states are float32."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=5, dtype="bfloat16")
    tensors = read_tensors(checkpoint)
    name = f"{PREFIX}layers.0.linear_attn.A_log"
    assert (tensors[name].dtype, tensors["mtp.fc.weight"].dtype.name) == (np.float32, "bfloat16")
    right = Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 256)
    rounded = copy_of(checkpoint, tmp_path / "rounded")
    for other in tensors:
        if other.endswith("A_log"):
            edit_tensor(rounded, other, lambda array: array.astype(tensors["mtp.fc.weight"].dtype))
    assert Oracle(load_checkpoint(rounded)).greedy(PROMPT, 256) != right, "rounding A_log changes nothing here"

    out = build_bundle(checkpoint, tmp_path / "out", max_model_len=300)
    assert ids_of(out, PROMPT, 256, 3) == right
    graph = onnx.load(out / "graphs/backbone.onnx")
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    (found,) = (array for key, array in stored.items() if re.search(r"layers\.0\..*a_log", key))
    assert found.dtype == np.float32
    assert found.tobytes() == tensors[name].tobytes()
    states = [value for value in graph.graph.input if value.name.startswith("past.")]
    assert {value.type.tensor_type.elem_type for value in states} == {onnx.TensorProto.FLOAT}


def test_a_float16_checkpoint_equals_the_oracle(tmp_path: Path) -> None:
    """LD-38: the third plain float type."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=5, dtype="float16")
    right = Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 16)
    assert ids_of(build_bundle(checkpoint, tmp_path / "out"), PROMPT, 16, 2) == right


# ------------------------------------------------------------------- LD-40: unknown architectures

OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen9_next": {"architectures": ["Foo"]},
    "llama": {"architectures": ["LlamaForSomethingElse"]},
}


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("model_type", OTHER_FAMILIES)
def test_a_family_of_a_later_release_is_refused_by_its_model_type(tmp_path: Path, model_type: str, mtp: bool) -> None:
    """LD-40: the message lists what is supported."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    change = {"model_type": model_type, **OTHER_FAMILIES[model_type]}
    edit_config(checkpoint, lambda config: {**config, **change})
    parts = (
        f"model_type '{model_type}'",
        change["architectures"][0],
        "Supported: deepseek_v3, glm4_moe, llama, mimo, qwen2, qwen3, qwen3_5, qwen3_5_moe",
    )
    build_refused(checkpoint, tmp_path / "out", *parts, mtp=mtp)
    report = inspect_checkpoint(checkpoint)
    assert not report["can_build"]
    assert model_type in report["problems"][0]


def test_a_directory_without_a_readable_configuration_is_refused(sharded: Path, tmp_path: Path) -> None:
    """LD-40: missing, not JSON with the line of the error, not an object, without a model_type."""
    checkpoint = copy_of(sharded, tmp_path / "model")
    config = checkpoint / "config.json"
    content = config.read_text()
    config.unlink()
    build_refused(checkpoint, tmp_path / "out", f"{config} is missing")
    config.write_text('{\n  "model_type": "qwen3_5",\n}\n')
    build_refused(checkpoint, tmp_path / "out", str(config), "not valid JSON", "line")
    config.write_text("[1]")
    build_refused(checkpoint, tmp_path / "out", str(config), "expected an object")
    config.write_text(content.replace('"model_type": "qwen3_5"', '"model_typ": "qwen3_5"'))
    build_refused(checkpoint, tmp_path / "out", "model_type None")
    config.write_text(content)
    assert build_bundle(checkpoint, tmp_path / "out").is_dir()


def test_a_place_that_holds_no_checkpoint_is_refused(sharded: Path, tmp_path: Path) -> None:
    """LD-40: no such directory, a file, a directory without weights, a name that nobody knows."""
    out = tmp_path / "out"
    build_refused(tmp_path / "nowhere", out, f"{tmp_path / 'nowhere'} does not exist")
    build_refused(sharded / "config.json", out, "config.json is a file")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copyfile(sharded / "config.json", empty / "config.json")
    build_refused(empty, out, f"{empty} holds no .safetensors file")
    build_refused(Path("no-such-directory"), out, "'no-such-directory' is no directory")


def test_a_hub_name_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LD-40: neither a directory, nor in the cache, nor on a hub that answers."""

    def download(repository: str, *, local_files_only: bool = False, **_: Any) -> str:
        asked.append((repository, local_files_only))
        raise LocalEntryNotFoundError("not cached") if local_files_only else ConnectionError("no network")

    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr("mtp_exporter.reading.resolve.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    build_refused(Path("owner/no-such-model"), tmp_path / "out", "'owner/no-such-model'", "network", "download")
    build_refused(Path("Qwen3.5-9B"), tmp_path / "out", "'Qwen/Qwen3.5-9B'", "could not be asked")
    places = ("owner/no-such-model", "Qwen/Qwen3.5-9B")
    assert asked == [(name, cached) for name in places for cached in (True, False)]


def test_a_tensor_that_the_index_does_not_know_is_refused(tmp_path: Path) -> None:
    """LD-26: it lies in a shard, so it is part of the checkpoint, indexed or not."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, shards=2)
    shard = min(checkpoint.glob("*.safetensors"))
    save_file({**load_file(shard), "model.language_model.layers.0.mystery.bias": np.zeros(4, np.float32)}, shard)
    build_refused(checkpoint, tmp_path / "out", "mystery.bias")


@pytest.mark.parametrize(("width", "stored"), [(20, 24), (144, 256)])
def test_an_attention_width_that_the_kernel_does_not_take_is_padded(tmp_path: Path, width: int, stored: int) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, head_dim=width, rope_parameters=rope)
    model = load_model(build_bundle(checkpoint, tmp_path / "out"))
    right = Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 40)
    assert [ids_of(model, PROMPT, 40, draft_tokens) for draft_tokens in (0, 3)] == [right, right]
    caches = {name: array for name, array in model.engine.sequences().snapshot(0).items() if name.endswith("key")}
    assert {array.shape[-1] for array in caches.values()} == {stored}


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda text: text.update(mtp_num_hidden_layers="1"), "mtp_num_hidden_layers = '1'"),
        (
            lambda text: text["rope_parameters"].update(partial_rotary_factor=float("inf")),
            "partial_rotary_factor = inf",
        ),
        (lambda text: text.update(rms_norm_eps=10**400), "rms_norm_eps"),
    ],
    ids=["text for a number", "infinity", "beyond a float"],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, edit: Callable[[dict], None], part: str) -> None:
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)

    def change(config: dict) -> dict:
        edit(config["text_config"])
        return config

    edit_config(checkpoint, change)
    build_refused(checkpoint, tmp_path / "out", part)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["nesting", "digits"])
def test_json_without_end_is_refused(tmp_path: Path, text: str) -> None:
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    (checkpoint / "config.json").write_text(text)
    build_refused(checkpoint, tmp_path / "out", "config.json")


def test_a_bundle_is_named_after_the_directory_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = random_checkpoint(tmp_path / "My-Model", seed=1)
    monkeypatch.chdir(checkpoint)
    assert build(BuildOptions(".", max_model_len=64)).directory == Path("bundles/My-Model")
