"""SV-05: what is written loads, and every edit is told in one sentence when the model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from mtp_engines.bundle import open_bundle
from mtp_serving.triton.backend import choose_gpu
from mtp_serving.triton.cli import triton
from mtp_serving.triton.config import INPUTS, OUTPUTS, Settings, problems, settings_from, text_of
from mtp_serving.triton.repository import write_repository
from tests.serving.triton.fake import Tensor, Utils, arguments, loaded
from tests.support import command_refused, copy_of, refused, run_command

Config = dict[str, Any]


def parsed(text: str) -> ModelConfig:
    """As Triton reads it."""
    return text_format.Parse(text, ModelConfig())


def as_json(text: str) -> Config:
    """As Triton hands it to a model."""
    return json_format.MessageToDict(parsed(text), preserving_proto_field_name=True)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(slots=2, max_queue=0, prefix_cache_bytes=0, threads=3, instances=2),
        Settings(backend="torch", device="cpu", cache_rows=4096),
        Settings(backend="tensorrt", gpus=(0, 2), instances=2),
        Settings(device="cuda"),
    ],
)
def test_what_is_written_is_read_back_without_a_problem(chain: Path, settings: Settings) -> None:
    manifest = open_bundle(chain).manifest
    message = parsed(text_of(settings, manifest))
    assert message.max_batch_size == 0
    assert message.model_transaction_policy.decoupled
    data_types = {tensor.name: tensor.data_type for tensor in (*message.input, *message.output)}
    assert data_types["input_ids"] == data_types["output_ids"] == 9, "INT64"
    assert data_types["text_input"] == data_types["text_output"] == 13, "STRING"
    assert all(tensor.optional for tensor in message.input)
    place = settings.place(manifest)
    group = message.instance_group[0]
    assert (group.kind, group.count) == ({"cuda": 1, "cpu": 2}[place], settings.instances)
    assert tuple(group.gpus) == settings.gpus
    config = as_json(text_of(settings, manifest))
    assert problems(config, manifest) == []
    kept = ("slots", "max_queue", "prefix_cache_bytes", "cache_rows", "threads", "backend", "device")
    assert [getattr(settings_from(config), name) for name in kept] == [getattr(settings, name) for name in kept]


def _set(path: str, value: Any) -> Callable[[Config], None]:
    def edit(config: Config) -> None:
        *way, last = path.split(".")
        for name in way:
            config = config[int(name) if name.isdecimal() else name]
        config[last] = value

    return edit


def _without(name: str, tensor: str) -> Callable[[Config], None]:
    def edit(config: Config) -> None:
        config[name] = [one for one in config[name] if one["name"] != tensor]

    return edit


def _parameter(name: str, value: str) -> Callable[[Config], None]:
    return _set(f"parameters.{name}", {"string_value": value})


EDITS: list[tuple[Callable[[Config], None], str]] = [
    (_set("max_batch_size", 8), "max_batch_size is 8, expected 0"),
    (_set("model_transaction_policy", {"decoupled": False}), "decoupled is false, expected true"),
    (_set("model_transaction_policy", {}), "decoupled is false, expected true"),
    (_set("dynamic_batching", {}), "dynamic_batching is set, expected nothing"),
    (_set("sequence_batching", {}), "sequence_batching is set, expected nothing"),
    (_parameter("slots", "9"), "slots is 9, and the bundle was built for a max_batch_size of 3"),
    (_parameter("slots", "0"), "slots is '0', expected a whole number of at least 1"),
    (_parameter("max_queue", "many"), "max_queue is 'many', expected a whole number of at least 0"),
    (_parameter("threads", "-1"), "threads is '-1', expected a whole number of at least 0"),
    (_parameter("prefix_cache_bytes", "1e9"), "prefix_cache_bytes is '1e9', expected a whole number"),
    (_parameter("backend", "vllm"), "backend is 'vllm', expected one of onnxruntime, torch, tensorrt"),
    (_parameter("device", "gpu"), "device is 'gpu', expected one of cpu, cuda"),
    (_parameter("lanes", "3"), "parameter lanes is not known"),
    (_set("instance_group", [{"kind": "KIND_GPU", "count": 1}]), "kind KIND_GPU, expected KIND_CPU"),
    (_set("instance_group", [{"kind": "KIND_MODEL"}]), "kind KIND_MODEL, expected KIND_CPU"),
    (_set("input.1.data_type", "TYPE_INT32"), "input input_ids has data_type TYPE_INT32, expected TYPE_INT64"),
    (_set("input.1.dims", [1]), "input input_ids has dims [1], expected [-1]"),
    (_set("input.0.optional", False), "input text_input has optional false, expected true"),
    (_set("input.0.name", "prompt"), "input prompt is not known"),
    *[(_without("input", one.name), f"input {one.name} is missing, expected {one.data_type}") for one in INPUTS],
    *[(_without("output", one.name), f"output {one.name} is missing, expected {one.data_type}") for one in OUTPUTS],
    (_set("output.0.data_type", "TYPE_FP32"), "output text_output has data_type TYPE_FP32, expected TYPE_STRING"),
    (_set("output.1.dims", [4]), "output output_ids has dims [4], expected [-1]"),
]


@pytest.mark.parametrize(("edit", "part"), EDITS, ids=[part for _, part in EDITS])
def test_every_edit_is_told_in_a_sentence_at_load(
    chain: Path, tmp_path: Path, edit: Callable[[Config], None], part: str
) -> None:
    given = arguments(chain, tmp_path / "m")
    config = json.loads(given["model_config"])
    edit(config)
    given["model_config"] = json.dumps(config)
    with pytest.raises(Utils.TritonModelException) as caught, loaded(given):
        pass
    message = str(caught.value)
    assert part in message
    assert "config.pbtxt" in message
    assert "\n" not in message
    assert message.endswith(".")


def test_several_edits_are_all_told(chain: Path) -> None:
    manifest = open_bundle(chain).manifest
    config = as_json(text_of(Settings(), manifest))
    assert problems(config, manifest) == [], "control: nothing is wrong before the edits"
    for edit, _ in (EDITS[0], EDITS[1], EDITS[5]):
        edit(config)
    assert len(problems(config, manifest)) == 3


def test_a_parameter_of_the_python_backend_itself_is_let_through(chain: Path) -> None:
    manifest = open_bundle(chain).manifest
    config = as_json(text_of(Settings(), manifest))
    _parameter("EXECUTION_ENV_PATH", "/env.tar.gz")(config)
    assert problems(config, manifest) == []


def test_a_server_that_misreads_arrays_is_refused_at_load(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 24.10 with NumPy 2 reads the first number again and again."""

    def misread(cls: type[Tensor], name: str, given: Any) -> Tensor:
        return cls(name, np.from_dlpack(given)[[0, 0, 0]])

    given = arguments(chain, tmp_path / "m")
    with loaded(given):
        pass  # Control: the same load without the fault.
    monkeypatch.setattr(Tensor, "from_dlpack", classmethod(misread))
    with pytest.raises(Utils.TritonModelException, match=r"\[7, 8, 9\] reads as \[7, 7, 7\]"), loaded(given):
        pass


@pytest.mark.parametrize(
    ("number", "before", "after"), [(1, None, "1"), (0, "2,3", "2"), (1, "2,3", "3"), (0, "GPU-a,GPU-b", "GPU-a")]
)
def test_an_instance_sees_its_own_gpu(number: int, before: str | None, after: str) -> None:
    environment = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    choose_gpu(number, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": after}


@pytest.mark.parametrize("link", [True, False])
def test_a_repository_is_written_and_written_again(chain: Path, tmp_path: Path, link: bool) -> None:
    out = tmp_path / "repository"
    (out / "another").mkdir(parents=True)
    for slots in (1, 2):
        model = write_repository(chain, out, Settings(slots=slots), "chain", link=link)
        assert model == out / "chain"
        assert sorted(path.name for path in out.iterdir()) == ["another", "chain"]
        assert (model / "1" / "bundle").is_symlink() == link
        assert f'string_value: "{slots}"' in (model / "config.pbtxt").read_text()
        compile((model / "1" / "model.py").read_text(), "model.py", "exec")
        assert open_bundle(model / "1" / "bundle").manifest == open_bundle(chain).manifest


def test_what_cannot_be_written_is_refused(chain: Path, tmp_path: Path) -> None:
    out = tmp_path / "repository"
    (out / "other").mkdir(parents=True)
    with refused("slots is 7", "max_batch_size of 3"):
        write_repository(chain, out, Settings(slots=7), "m", link=True)
    with refused("is no model that this command wrote"):
        write_repository(chain, out, Settings(), "other", link=True)
    with refused("'a/b'", "--name"):
        write_repository(chain, out, Settings(), "a/b", link=True)
    with refused("--gpus", "the device is cpu"):
        write_repository(chain, out, Settings(gpus=(0,)), "m", link=True)
    damaged = copy_of(chain, tmp_path / "damaged")
    (damaged / "graphs" / "weights.data").write_bytes(b"")
    with refused("weights.data has 0 bytes"):
        write_repository(damaged, out, Settings(), "m", link=True)
    assert sorted(path.name for path in out.iterdir()) == ["other"]


def test_the_command_writes_a_repository(chain: Path, tmp_path: Path) -> None:
    done = run_command("mtp-export", "triton", chain, "--out", tmp_path / "r", "--name", "m", "--link", "--slots", "2")
    assert done.stdout == f"model: {tmp_path / 'r' / 'm'}\n"
    command_refused(run_command("mtp-export", "triton", chain, "--out", tmp_path / "r", "--slots", "9"), "slots is 9")
    wrong = CliRunner().invoke(triton, [str(chain), "--out", str(tmp_path / "r"), "--gpus", "a"])
    assert wrong.exit_code == 2
    assert "expected numbers with commas, found 'a'" in wrong.output
