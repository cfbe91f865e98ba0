"""Every kernel as PTX for every GPU, compiled without one, and the folder that keeps the results."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtp_plugins import accept, deferred_conv, deferred_delta
from mtp_plugins.accept import launch as accept_launch
from mtp_plugins.deferred_conv import launch as conv_launch
from mtp_plugins.deferred_delta import launch as delta_launch
from mtp_plugins.operator import Operator
from mtp_plugins.triton_kernels import cache, entry
from mtp_plugins.triton_kernels.launch import Launch
from mtp_plugins.triton_kernels.ptx import CAPABILITIES, PTX_VERSION, Ptx
from tests.plugins.workers import Worker

TARGETS = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}


@dataclass(frozen=True)
class Case:
    """A kernel with the sizes of a real model."""

    operator: Operator
    name: str
    launch: Launch
    signature: Mapping[str, str]


def delta(rows: int = 5) -> Case:
    """DeferredDelta of a model with 16 key heads and 32 value heads."""
    heads = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
    launch = delta_launch.launch(batch=1, rows=rows, staged_rows=5, **heads)
    return Case(deferred_delta.OPERATOR, "deferred_delta", launch, delta_launch.signature("bf16"))


def conv(rows: int = 5) -> Case:
    """DeferredConv of the same model."""
    launch = conv_launch.launch(batch=1, rows=rows, staged_rows=5, channels=8192, taps=4)
    return Case(deferred_conv.OPERATOR, "deferred_conv", launch, conv_launch.signature("bf16"))


def accepting(draft_tokens: int = 4) -> Case:
    """Accept."""
    launch = accept_launch.launch(batch=1, draft_tokens=draft_tokens)
    return Case(accept.OPERATOR, "accept", launch, accept_launch.signature())


CASES = {"deferred_delta": delta, "deferred_conv": conv, "accept": accepting}


def kernel(name: str) -> Any:
    """A kernel by name; in a worker."""
    return getattr(importlib.import_module(f"mtp_plugins.{name}.kernel"), name)


def compile_in_worker(
    name: str, signature: dict[str, str], constexprs: dict[str, int], capability: int, warps: int, folder: Path | None
) -> Ptx:
    """`compile_ptx`; in a worker."""
    from mtp_plugins.triton_kernels.ptx import compile_ptx

    return compile_ptx(kernel(name), signature, constexprs, capability, warps, directory=folder)


def parameters_in_worker(name: str) -> list[str]:
    """Names of a kernel's parameters; in a worker."""
    return list(kernel(name).arg_names)


def intermediate_in_worker(name: str, signature: dict[str, str], constexprs: dict[str, int]) -> str:
    """Triton's GPU representation of a kernel, which names layouts; in a worker."""
    import triton
    from triton.backends.compiler import GPUTarget

    from mtp_plugins.triton_kernels.ptx import source

    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source(kernel(name), signature, constexprs), target=target).asm["ttgir"])


def compiled(worker: Worker, case: Case, capability: int = 90, folder: Path | None = None) -> Ptx:
    """The PTX of a case."""
    constants = dict(case.launch.constexprs)
    warps = case.launch.num_warps
    result = worker.call(compile_in_worker, case.name, dict(case.signature), constants, capability, warps, folder)
    assert isinstance(result, Ptx)
    return result


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles_for_every_gpu(compiler: Worker, name: str, capability: int) -> None:
    case = CASES[name]()
    ptx = compiled(compiler, case, capability)
    assert (ptx.entry, ptx.version, ptx.target) == (name, "8.7", TARGETS[capability])
    declared = re.findall(r"\.param \.(\w+) .*?(\w+_param_\d+)[,\n]", ptx.text)
    assert declared == [("u64", f"{name}_param_{i}") for i in range(len(case.signature))]
    used = set(re.findall(r"\w+_param_\d+", ptx.text))
    assert used == {parameter for _, parameter in declared}, "the body knows no parameter that is not passed"
    assert f".reqntid {32 * case.launch.num_warps}" in ptx.text
    assert 0 <= ptx.shared <= 48 << 10, "more shared memory has to be asked for at launch"
    assert str(Path(__file__).parents[2]) not in ptx.text, "equal kernels are equal wherever they were compiled"
    if "*bf16" in case.signature.values():
        assert re.search(r"cvt\.rn\.bf16(x2)?\.f32", ptx.text), "the output is rounded to nearest"


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_the_inputs_then_the_outputs_then_constants(compiler: Worker, name: str) -> None:
    case = CASES[name]()
    pointers = [f"{value}_ptr" for value in case.operator.inputs + case.operator.outputs]
    assert compiler.call(parameters_in_worker, name) == [*pointers, *case.launch.constexprs]
    assert set(case.signature) == set(pointers)


def representation(worker: Worker, case: Case) -> str:
    """Triton's GPU representation of a case."""
    text = worker.call(intermediate_in_worker, case.name, dict(case.signature), dict(case.launch.constexprs))
    return str(text)


def events(text: str, tile: str) -> list[str]:
    """Loops, barriers and accesses to tiles of this type, in the order of the text."""
    found = re.findall(rf"(scf\.for) |(gpu\.barrier)|(tt\.load) [^\n]*: {tile}|(tt\.store) [^\n]*: {tile}", text)
    return ["".join(event) for event in found]


def test_a_recurrent_state_is_read_once_and_written_once(compiler: Worker) -> None:
    order = events(representation(compiler, delta(16)), r"tensor<128x32x!tt\.ptr<f32>")
    assert order == ["tt.load", "scf.for", "gpu.barrier", "tt.store", "scf.for"], "committed rows, then new rows"


def test_a_convolution_state_is_written_when_all_of_it_was_read(compiler: Worker) -> None:
    order = events(representation(compiler, conv(16)), r"tensor<4x128x!tt\.ptr<\w+>")
    assert order == ["tt.load", "tt.load", "gpu.barrier", "tt.store"], "the state and the staged rows, then the state"


def sums(text: str) -> list[str]:
    """Every reduction's operand with the layout that decides the order of its sum."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    operands = re.findall(r"\}\) : \((tensor<[^)]*)\) ->", text)
    return [re.sub(r"#\w+", lambda name: layouts[name[0]], operand) for operand in operands]


def test_sums_run_in_the_same_order_for_any_number_of_rows(compiler: Worker) -> None:
    one, others = sums(representation(compiler, delta(1))), [sums(representation(compiler, delta(n))) for n in (2, 16)]
    assert len(one) == 5, "two norms, two reads and an output"
    assert others == [one, one]
    assert one[0] == one[3], "a row is committed as it was verified"
    narrow = delta()
    narrow = Case(
        narrow.operator,
        narrow.name,
        Launch(narrow.launch.grid, dict(narrow.launch.constexprs) | {"value_block": 16}, 4),
        narrow.signature,
    )
    assert sums(representation(compiler, narrow)) != one, "control: a layout shows"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".param .u64 .ptr .global .align 1 accept_param_5", ".param .u32 accept_param_5", "parameters of accept"),
        (".version 8.7", ".version 9.4", "version of accept"),
        (".target sm_90a", ".target sm_89", "target of accept"),
        (".reqntid 32", ".reqntid 64", "threads of accept"),
        (".visible .entry accept(", ".visible .entry other(", "entry of accept"),
        (".visible .entry accept(", ".visible .func accept(", "no entry that could be read"),
        ("ret;", "add.f32 %f1, %f2, %f3;\n\tret;", "may fuse"),
    ],
)
def test_control_a_wrong_text_is_refused(compiler: Worker, old: str, new: str, message: str) -> None:
    ptx, types = compiled(compiler, accepting()), ["*i64"] * 6
    entry.check(ptx.text, "accept", types, 90, 1, PTX_VERSION)
    assert old in ptx.text
    with pytest.raises(entry.PtxError, match=message):
        entry.check(ptx.text.replace(old, new), "accept", types, 90, 1, PTX_VERSION)


def test_a_used_scratch_buffer_is_refused(compiler: Worker) -> None:
    text = compiled(compiler, accepting()).text
    unused = text.replace("[accept_param_4]", "[x]").replace("[accept_param_5]", "[x]")
    assert "accept_param_4" not in entry.without_scratch(unused, "accept")
    with pytest.raises(entry.PtxError, match="uses accept_param_4, a scratch buffer of Triton"):
        entry.without_scratch(text, "accept")


def test_an_interpreted_kernel_is_refused(interpreter: Worker) -> None:
    with pytest.raises(entry.PtxError, match="Import the kernel in a process where TRITON_INTERPRET is not set"):
        compiled(interpreter, accepting())


def test_a_parameter_without_a_value_is_refused(compiler: Worker) -> None:
    case = accepting()
    fewer = {name: kind for name, kind in case.signature.items() if name != "chosen_ptr"}
    with pytest.raises(entry.PtxError, match="chosen_ptr would have no value"):
        compiled(compiler, Case(case.operator, case.name, case.launch, fewer))


def test_a_result_is_kept_and_taken_from_the_folder(compiler: Worker, tmp_path: Path) -> None:
    first = compiled(compiler, accepting(), folder=tmp_path / "ptx")
    (path,) = (tmp_path / "ptx").iterdir()
    assert re.fullmatch(r"accept\.sm_90\.[0-9a-f]{32}\.json", path.name)
    assert compiled(compiler, accepting(), folder=tmp_path / "ptx") == first
    stored = json.loads(path.read_text())
    # The name has the first half of the key; an entry that someone signed for another key is not taken.
    cache.store(path, "another key", stored["fields"] | {"shared": 12345})
    assert compiled(compiler, accepting(), folder=tmp_path / "ptx") == first
    assert json.loads(path.read_text()) == stored


def test_the_folder_is_really_read(compiler: Worker, tmp_path: Path) -> None:
    first = compiled(compiler, accepting(), folder=tmp_path)
    (path,) = tmp_path.iterdir()
    key = compiler.call(digest_in_worker, "accept", accepting(), 90)
    marked = {"entry": "accept", "text": "marked", "shared": 1, "version": "8.7", "target": "sm_90a"}
    cache.store(path, key, marked)
    assert compiled(compiler, accepting(), folder=tmp_path) == Ptx(**marked) != first


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", "cut", "changed", "not utf-8"])
def test_a_damaged_entry_is_made_again(compiler: Worker, tmp_path: Path, damage: str) -> None:
    first = compiled(compiler, accepting(), folder=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    damaged = {"cut": whole[:-20], "changed": whole.replace(b"ld.global", b"ld.local", 1), "not utf-8": b"\xff\xfe"}
    path.write_bytes(damaged.get(damage, damage.encode()))
    assert path.read_bytes() != whole
    assert compiled(compiler, accepting(), folder=tmp_path) == first
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path], "nothing half-written stays"


def digest_in_worker(name: str, case: Case, capability: int) -> str:
    """The key of a case; in a worker."""
    from mtp_plugins.triton_kernels.ptx import digest

    function = kernel(name)
    ordered = {parameter: case.signature[parameter] for parameter in function.arg_names if parameter in case.signature}
    return digest(function, ordered, case.launch.constexprs, capability, case.launch.num_warps)


def test_whatever_the_text_depends_on_changes_the_key(compiler: Worker) -> None:
    case = accepting()
    key = compiler.call(digest_in_worker, "accept", case, 90)
    assert compiler.call(digest_in_worker, "accept", accepting(), 90) == key
    warps = Launch(case.launch.grid, case.launch.constexprs, 2)
    types = dict(case.signature) | {"next_token_ptr": "*i32"}
    others = [
        compiler.call(digest_in_worker, "accept", case, 89),
        compiler.call(digest_in_worker, "accept", accepting(5), 90),
        compiler.call(digest_in_worker, "accept", Case(case.operator, case.name, warps, case.signature), 90),
        compiler.call(digest_in_worker, "accept", Case(case.operator, case.name, case.launch, types), 90),
        compiler.call(changed_source_in_worker, "accept", case, 90),
    ]
    assert len({key, *others}) == 1 + len(others)


def changed_source_in_worker(name: str, case: Case, capability: int) -> str:
    """The key of a case whose kernel differs in one constant of its text; in a worker."""
    from mtp_plugins.triton_kernels.ptx import digest

    function = kernel(name)
    changed = type(function)(function.fn)
    changed._unsafe_update_src(function.src.replace("other=0)", "other=1)"))
    return digest(changed, dict(case.signature), case.launch.constexprs, capability, case.launch.num_warps)
