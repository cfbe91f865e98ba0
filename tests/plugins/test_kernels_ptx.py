"""Every kernel as PTX for every GPU, compiled without one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_plugins.triton_kernels import entry
from mtp_plugins.triton_kernels.ptx import CAPABILITIES, PTX_VERSION
from tests.plugins.ptx_cases import (
    CASES,
    Case,
    accepting,
    compiled,
    conv,
    delta,
    intermediate_in_worker,
    names_in_worker,
    partial,
    product,
    specialised_in_worker,
)
from tests.plugins.workers import Worker

TARGETS = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
PRODUCTS = {"paged_attention_partial", "skinny_product"}
TYPES = {"*": "u64", "i": "u32"}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles_for_every_gpu(compiler: Worker, name: str, capability: int) -> None:
    """`compile_ptx` itself refuses operations that may be fused; so products of tensor cores have none around them."""
    case = CASES[name]()
    ptx = compiled(compiler, case, capability)
    assert (ptx.entry, ptx.version, ptx.target) == (name, "8.7", TARGETS[capability])
    declared = re.findall(r"\.param \.(\w+) .*?(\w+_param_\d+)[,\n]", ptx.text)
    kinds = [TYPES[case.signature[parameter][0]] for parameter in case.parameters()]
    assert declared == [(kind, f"{name}_param_{i}") for i, kind in enumerate(kinds)]
    used = set(re.findall(r"\w+_param_\d+", ptx.text))
    assert used == {parameter for _, parameter in declared}, "the body knows no parameter that is not passed"
    assert f".reqntid {32 * case.launch.num_warps}" in ptx.text
    assert 0 <= ptx.shared <= 48 << 10, "more shared memory has to be asked for at launch"
    assert str(Path(__file__).parents[2]) not in ptx.text, "equal kernels are equal wherever they were compiled"
    floats = {parameter: kind for parameter, kind in case.signature.items() if kind == "*bf16"}
    if floats and name != "paged_kv_append":
        assert re.search(r"cvt\.rn\.bf16(x2)?\.f32", ptx.text), "the output, or a weight, is rounded to nearest"
    instruction = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    assert (instruction in ptx.text) == (name in PRODUCTS), "tensor cores, with sums in float32"


@pytest.mark.parametrize("case", [partial, product])
def test_products_of_float32_are_no_products_of_tensor_cores(compiler: Worker, case: type[Case]) -> None:
    ptx = compiled(compiler, case(5, "fp32"))
    assert "fma.rn.f32" in ptx.text
    assert "mma" not in ptx.text, "TF32 has 10 bits"
    assert ptx.shared <= 48 << 10


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_the_inputs_the_integers_the_outputs_and_constants(compiler: Worker, name: str) -> None:
    case = CASES[name]()
    assert compiler.call(names_in_worker, case) == [*case.parameters(), *case.launch.constexprs]
    assert set(case.signature) == set(case.parameters())


@pytest.mark.parametrize("name", CASES)
def test_one_compiled_kernel_takes_any_number_of_rows(compiler: Worker, name: str) -> None:
    one = CASES[name](1).launch
    for rows in (2, 15, 16, *([] if name == "accept" else [256])):
        other = CASES[name](rows).launch
        assert other.scalars != one.scalars
        assert replace(other, grid=one.grid, scalars=one.scalars) == one
    specialised = compiler.call(specialised_in_worker, CASES[name]())
    assert {parameter for parameter, yes in specialised.items() if not yes} == set(one.scalars)
    assert all(yes for parameter, yes in specialised.items() if parameter.endswith("_ptr")), "control: Triton's way"


def representation(worker: Worker, case: Case) -> str:
    """Triton's GPU representation of a case."""
    return str(worker.call(intermediate_in_worker, case))


def events(text: str, tile: str) -> list[str]:
    """Loops, barriers and accesses to tiles of this type, in the order of the text."""
    found = re.findall(rf"(scf\.while) |(gpu\.barrier)|(tt\.load) [^\n]*: {tile}|(tt\.store) [^\n]*: {tile}", text)
    return ["".join(event) for event in found]


def test_a_recurrent_state_is_read_once_and_written_once(compiler: Worker) -> None:
    order = events(representation(compiler, delta()), r"tensor<128x32x!tt\.ptr<f32>")
    rows = "accepted rows, kept rows, the write, other rows"
    assert order == ["tt.load", "scf.while", "scf.while", "gpu.barrier", "tt.store", "scf.while"], rows


def test_a_convolution_state_is_written_when_all_of_it_was_read(compiler: Worker) -> None:
    order = events(representation(compiler, conv()), r"tensor<4x128x!tt\.ptr<\w+>")
    assert order == ["scf.while", *["tt.load"] * 3, "gpu.barrier", "tt.store"], "rows; old, staged and new; the state"


def sums(text: str) -> list[str]:
    """Every reduction's operand with the layout that decides the order of its sum."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    operands = re.findall(r"\}\) : \((tensor<[^)]*)\) ->", text)
    return [re.sub(r"#\w+", lambda name: layouts[name[0]], operand) for operand in operands]


def test_sums_run_in_the_same_order_for_rows_accepted_kept_and_neither(compiler: Worker) -> None:
    order = sums(representation(compiler, delta()))
    assert len(order) == 1 + 2 * 4, "a read of accepted rows; two norms, a read and an output of kept rows and others"
    assert order[1:5] == order[5:]
    assert order[0] == order[3], "a row is committed as it was verified"
    narrow = delta()
    narrow = replace(narrow, launch=replace(narrow.launch, constexprs={**narrow.launch.constexprs, "value_block": 16}))
    assert sums(representation(compiler, narrow)) != order, "control: a layout shows"


ACCEPT_TYPES = ["*i64", "*i64", "i32", *["*i64"] * 4]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".param .u64 .ptr .global .align 1 accept_param_6", ".param .u32 accept_param_6", "parameters of accept"),
        (".param .u32 accept_param_2", ".param .u64 accept_param_2", "parameters of accept"),
        (".version 8.7", ".version 9.4", "version of accept"),
        (".target sm_90a", ".target sm_89", "target of accept"),
        (".reqntid 32", ".reqntid 64", "threads of accept"),
        (".visible .entry accept(", ".visible .entry other(", "entry of accept"),
        (".visible .entry accept(", ".visible .func accept(", "no entry that could be read"),
        ("ret;", "add.f32 %f1, %f2, %f3;\n\tret;", "may fuse"),
    ],
)
def test_control_a_wrong_text_is_refused(compiler: Worker, old: str, new: str, message: str) -> None:
    ptx = compiled(compiler, accepting())
    entry.check(ptx.text, "accept", ACCEPT_TYPES, 90, 1, PTX_VERSION)
    assert old in ptx.text
    with pytest.raises(entry.PtxError, match=message):
        entry.check(ptx.text.replace(old, new), "accept", ACCEPT_TYPES, 90, 1, PTX_VERSION)


def test_a_used_scratch_buffer_is_refused(compiler: Worker) -> None:
    text = compiled(compiler, accepting()).text
    unused = text.replace("[accept_param_5]", "[x]").replace("[accept_param_6]", "[x]")
    assert "accept_param_5" not in entry.without_scratch(unused, "accept")
    with pytest.raises(entry.PtxError, match="uses accept_param_5, a scratch buffer of Triton"):
        entry.without_scratch(text, "accept")


def test_an_interpreted_kernel_is_refused(interpreter: Worker) -> None:
    with pytest.raises(entry.PtxError, match="Import the kernel in a process where TRITON_INTERPRET is not set"):
        compiled(interpreter, accepting())


def test_a_parameter_without_a_value_is_refused(compiler: Worker) -> None:
    case = accepting()
    fewer = {name: kind for name, kind in case.signature.items() if name != "chosen_ptr"}
    with pytest.raises(entry.PtxError, match="chosen_ptr would have no value"):
        compiled(compiler, replace(case, signature=fewer))
