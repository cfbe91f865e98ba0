"""`mtp-run bench`: forced drafts, arithmetic, the check of tokens, sizes, refusals, repeating. Asserts no time."""

from __future__ import annotations

import functools
import json
import platform
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.bundle import open_bundle
from mtp_engines.command import run_command as run_in_process
from mtp_engines.costs import CycleCosts
from mtp_engines.engine import Floats, Ids, Sequences
from mtp_runtime import Model
from mtp_runtime.stats import Stats
from mtp_tools.bench import cli, machine, measuring
from mtp_tools.bench.answers import Answer, CycleTime, Task, answer
from mtp_tools.bench.cases import PLAIN, Case, acceptances_from, branches_from, cases_of, require_served, widths_from
from mtp_tools.bench.forcing import Script
from mtp_tools.bench.measuring import Plan, WrongTokensError, measure, rotated
from mtp_tools.bench.plot import draw, levels_of, lines_of
from mtp_tools.bench.report import case_dict, speed_table
from mtp_tools.bench.sizes import sizes_of, step_bytes
from mtp_tools.bench.summary import Spread, figures_of, shares, summarise
from mtp_tools.verify.runs import CommitsEverything
from tests.fixtures.checkpoints import partial_checkpoint, random_checkpoint, tinytext_tokenizer
from tests.fixtures.moe_families import qwen3_5_moe_checkpoint
from tests.support import build_bundle, command_refused, load_model, refused, run_command

PROMPT = [5, 6, 20]
NEW = 24
SMALL = ["--prompt-tokens", "6", "--new-tokens", "12", "--repeats", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    return build_bundle(partial_checkpoint(folder / "checkpoint"), folder / "bundle", draft_tokens=3, max_batch_size=2)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    return load_model(bundle)


@pytest.fixture(autouse=True)
def _small_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asserts a time, so the bandwidth may be read from an array that is too small to mean anything."""
    monkeypatch.setattr(cli.machine, "ReadBandwidth", functools.partial(machine.ReadBandwidth, size=1 << 16))


def plan(*cases: Case, seed: int = 0, repeats: int = 1, wrap: Any = None) -> Plan:
    return Plan([PROMPT], [PLAIN, *cases], NEW, repeats, seed, wrap)


def no_bandwidth() -> float:
    return 1.0


class CountsHeadCalls(CommitsEverything):
    """Sequences that remember how many drafts their head was asked for."""

    asked = 0

    def __init__(self, inner: Sequences) -> None:
        super().__init__(inner)
        self.commit = inner.commit
        self.draft = self._counted

    def _counted(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int) -> Ids:
        CountsHeadCalls.asked += draft_tokens
        return self._inner.draft(tokens, hidden, rows, draft_tokens)


# Lists and cases


def test_plain_decoding_is_always_first_and_only_once() -> None:
    assert cases_of([0, 2], []) == [PLAIN, Case(2)]
    assert cases_of([0, "auto"], [0.5]) == [PLAIN, Case("auto", 0.5)]
    assert widths_from("0,2,auto") == [0, 2, "auto"]
    assert cases_of([2, 1], [1.0, 0.5]) == [PLAIN, Case(2, 1.0), Case(1, 1.0), Case(2, 0.5), Case(1, 0.5)]


@pytest.mark.parametrize(
    ("parse", "text", "found"),
    [
        (widths_from, "1,x", "'1,x'"),
        (widths_from, "", "''"),
        (widths_from, "1,-1", "-1"),
        (widths_from, "1,2,1", "names 1 twice"),
        (widths_from, "auto,1,auto", "names auto twice"),
        (widths_from, "1,often", "'1,often'"),
        (acceptances_from, "1.5", "1.5"),
        (acceptances_from, "nan", "nan"),
        (acceptances_from, "0.5;1", "'0.5;1'"),
        (acceptances_from, "1,1.0", "names 1.0 twice"),
        (functools.partial(branches_from, acceptances=[]), "0,3", "3"),
        (functools.partial(branches_from, acceptances=[]), "0,-1", "-1"),
        (functools.partial(branches_from, acceptances=[]), "1,1", "names 1 twice"),
        (functools.partial(branches_from, acceptances=[0.5]), "0,1", "--force-accept forces one draft"),
    ],
)
def test_a_bad_list_is_refused(parse: Callable[[str], Any], text: str, found: str) -> None:
    with pytest.raises(click.UsageError, match=found) as caught:
        parse(text)
    assert str(caught.value.message).endswith(".")


# Forced drafts


@pytest.mark.parametrize(("acceptance", "right"), [(1.0, 100), (0.7, 70), (0.25, 25), (0.0, 0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_script_keeps_to_its_share(acceptance: float, right: int, seed: int) -> None:
    script = Script(acceptance, seed)
    assert sum(script(cycle, 1) for cycle in range(100)) == pytest.approx(right, abs=1)


def test_each_position_keeps_to_the_share_of_what_reaches_it() -> None:
    script = Script(0.7, 3)
    counts = [script(cycle, 3) for cycle in range(1000)]
    reached = [sum(count >= position for count in counts) for position in range(4)]
    shares_of_reached = [after / before for before, after in pairwise(reached)]
    assert shares_of_reached == pytest.approx([0.7] * 3, abs=0.02)


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    def drawn(seed: int) -> list[int]:
        script = Script(0.5, seed)
        return [script(cycle, 2) for cycle in range(60)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2), "control: another seed is another order"


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [1.0, 0.5, 0.0])
def test_forced_drafts_are_accepted_exactly_as_the_script_says(model: Model, width: int, acceptance: float) -> None:
    case = Case(width, acceptance)
    (round_,) = measure(model, plan(case, seed=7), no_bandwidth).rounds
    expected, script, emitted = Stats(), Script(acceptance, 7), 1
    while emitted < NEW:
        drafted = min(width, NEW - emitted - 1)
        right = script(expected.cycles, drafted)
        expected.add_cycle(drafted, right, right + 1, "forced")
        emitted += right + 1
    found = round_[case][0].stats.as_dict() | {"seconds": None, "drafter": None}
    assert found == expected.as_dict() | {"seconds": None}
    other = measure(model, plan(Case(width, 0.25), seed=7), no_bandwidth).rounds[0][Case(width, 0.25)][0].stats
    assert other.accepted_by_position != expected.accepted_by_position, "control: another share gives other counts"


def test_the_head_runs_though_its_tokens_are_thrown_away(model: Model) -> None:
    CountsHeadCalls.asked = 0
    task = Task(PROMPT, answer(model, Task(PROMPT, (), NEW), PLAIN).token_ids, NEW, host_loop=True)
    forced = answer(model, Task(**{**vars(task), "wrap": CountsHeadCalls}), Case(2, 0.5))
    assert forced.stats.drafted_by_source == {"forced": forced.stats.drafted}
    assert CountsHeadCalls.asked == forced.stats.drafted > 0
    CountsHeadCalls.asked = 0
    answer(model, Task(**{**vars(task), "wrap": CountsHeadCalls}), PLAIN)
    assert CountsHeadCalls.asked == 0, "control: plain decoding asks the head for nothing"


def test_branches_are_cases_of_their_own_where_a_draft_has_room_for_them(model: Model) -> None:
    widths: list[Any] = [0, 1, 2, "auto"]
    assert cases_of(widths, [], [0, 2]) == [PLAIN, Case(1), Case(2), Case("auto"), Case(2, None, 2)]
    assert [case.verified_rows for case in (PLAIN, Case(3), Case(3, None, 2), Case("auto"))] == [1, 4, 12, None]
    several = Plan([[9, 8, 7]], [PLAIN, Case(2), Case(2, None, 1)], NEW, 1, 0)
    (round_,) = measure(model, several, no_bandwidth).rounds
    chain, tree = summarise([round_])[1:]
    assert chain.stats["rescued"] == 0 < tree.stats["rescued"]
    assert tree.stats["cycles"] < chain.stats["cycles"]
    assert "| head, 1 branch, 6 rows | 2 |" in "".join(speed_table([tree]))
    assert case_dict(tree)["draft_branches"] == 1
    assert list(lines_of(summarise([round_]))) == ["drafts of the head", "drafts of the head, 1 branch"]
    with refused("asks for 2", "--max-batch-size 3"):
        require_served([Case(2, None, 2)], 10, 10, model.manifest)


def test_time_on_a_cpu_leaves_out_what_others_take(model: Model, bundle: Path) -> None:
    """The wall's clock stands still here: whoever looks at it finds no time at all."""
    task = Task(PROMPT, (), NEW, cpu_time=True)
    assert answer(model, task, Case(2), clock=lambda: 0.0).prefill_s > 0
    assert answer(model, Task(PROMPT, (), NEW), Case(2), clock=lambda: 0.0).prefill_s == 0, "control: the wall's clock"
    several = run_command("mtp-run", "bench", bundle, "--cpu-time", "--threads", "2")
    command_refused(several, "--cpu-time", "--threads 1", code=2)


# Rounds and the check of tokens


def test_every_case_leads_a_round_and_the_warm_up_is_not_counted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [PLAIN, Case(1), Case(2)]
    assert [rotated(cases, number)[0] for number in range(4)] == [*cases, PLAIN]
    order: list[int] = []

    def remembered(model_: Model, task: Task, case: Case) -> Answer:
        order.append(case.draft_tokens)
        return answer(model_, task, case)

    monkeypatch.setattr(measuring, "answer", remembered)
    lines: list[str] = []
    measured = measure(model, plan(*cases[1:], repeats=3), no_bandwidth, lines.append)
    assert order == [0, *[0, 1, 2], *[0, 1, 2], *[1, 2, 0], *[2, 0, 1]]
    assert len(measured.rounds) == len(measured.bandwidths) == 3
    assert [list(round_) for round_ in measured.rounds] == [cases] * 3
    assert lines[0] == "warm-up is done"


@pytest.mark.parametrize("case", [Case(3), Case(3, 0.0), Case(2, 0.5), Case("auto", 0.5)])
def test_control_a_faulty_engine_is_refused_and_an_honest_one_is_not(
    model: Model, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where drafts cost nothing, `auto` drafts.
    free = CycleCosts(verify=(1.0,) * 4, draft=(0.0,) * 3, catch_up=0.0, commit=0.0)
    monkeypatch.setattr(model.auto, "costs", lambda *_, **__: free)
    measure(model, plan(case), no_bandwidth)
    with refused(f"K = {case.draft_tokens}", "differs from plain decoding at token", error=WrongTokensError):
        measure(model, plan(case, wrap=CommitsEverything), no_bandwidth)


def test_the_command_ends_with_one_and_writes_nothing_when_tokens_differ(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mtp_engines.command.signal.signal", lambda number, handler: None)
    arguments = [str(bundle), *SMALL, "--draft-tokens", "3", "--force-accept", "0", "--json", str(tmp_path / "out")]
    honest = run_in_process(cli.bench, arguments)
    assert honest == 0
    (tmp_path / "out").unlink()
    monkeypatch.setattr(cli, "Plan", functools.partial(Plan, wrap=CommitsEverything))
    assert run_in_process(cli.bench, arguments) == 1
    assert "differs from plain decoding" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Arithmetic


def ticking() -> Callable[[], float]:
    """A clock that is one second further on at every look."""
    looks = iter(range(1 << 30))
    return lambda: float(next(looks))


def test_every_look_at_the_clock_is_accounted_for(model: Model) -> None:
    """A timed call takes one tick; so the split of a cycle can be counted by hand."""
    found = answer(model, Task(PROMPT, (), NEW), Case(2), ticking())
    # propose: 3 ticks from outside, 1 of them the head; observe: 1.
    expected = {"draft": 4.0, "verify": 1.0, "commit": 1.0, "engine": 3.0, "wall": 11.0}
    for cycle in found.cycles[:-1]:
        assert {name: getattr(cycle, name) for name in expected} == expected
    assert sum(cycle.emitted for cycle in found.cycles) == len(found.token_ids) - 1 == NEW - 1
    assert len(found.cycles) == found.stats.cycles
    plain = answer(model, Task(PROMPT, (), NEW), PLAIN, ticking()).cycles[0]
    assert (plain.engine, plain.verify, plain.commit) == (2.0, 1.0, 1.0), "control: plain decoding runs no head"


def cycle(wall: float, emitted: int, draft: float = 0.0) -> CycleTime:
    return CycleTime(wall, draft, verify=0.25, commit=0.05, engine=0.5, emitted=emitted)


def an_answer(prefill_s: float, *cycles: CycleTime) -> Answer:
    stats = Stats()
    for one in cycles:
        stats.add_cycle(3, one.emitted - 1, one.emitted)
    return Answer(tuple(range(1 + sum(one.emitted for one in cycles))), 8, prefill_s, cycles, stats)


def test_figures_are_sums_over_sums() -> None:
    found = figures_of([an_answer(2.0, cycle(2.0, 1, 0.5), cycle(1.0, 3, 0.1)), an_answer(6.0, cycle(1.0, 4, 0.3))])
    expected = {
        "prefill_tokens_per_s": 16 / 8.0,
        "prefill_ms": 4000.0,
        "decode_tokens_per_s": 8 / 4.0,
        "later_tokens_per_s": 3.0,
        "cycle_ms": 4000 / 3,
        "first_draft_ms": 400.0,
        "python_us_per_cycle": 0.5e6,
        "draft_ms": 300.0,
        "verify_ms": 250.0,
        "commit_ms": 50.0,
    }
    assert found == pytest.approx(expected)


def test_ratios_are_taken_within_a_round() -> None:
    """The machine is three times slower in the second round; drafts win by the same factor in both."""
    fast = {PLAIN: [an_answer(1.0, cycle(1.0, 1))], Case(3): [an_answer(1.0, cycle(2.0, 4))]}
    slow = {PLAIN: [an_answer(3.0, cycle(3.0, 1))], Case(3): [an_answer(3.0, cycle(6.0, 4))]}
    plain, drafted = summarise([fast, slow, slow])
    assert plain.ratios["decode_tokens_per_s"] == Spread(1.0, 1.0, 1.0)
    assert vars(drafted.ratios["decode_tokens_per_s"]) == pytest.approx({"median": 2, "least": 2, "greatest": 2})
    assert drafted.figures["decode_tokens_per_s"] == Spread(4 / 6, 4 / 6, 2.0)
    assert "draft_ms" not in drafted.ratios
    assert drafted.stats["emitted_histogram"] == {"4": 1}, "counts are those of one round"
    mixed = {PLAIN: fast[PLAIN], Case(3): slow[Case(3)]}
    assert summarise([mixed])[1].ratios["decode_tokens_per_s"].median < 1, "control: rounds that are mixed up show"


def test_the_share_of_the_roofline_pairs_each_step_with_its_own_bandwidth() -> None:
    assert shares([1.0, 2.0, 1.0], [100.0, 50.0, 200.0], 50) == Spread(0.5, 0.25, 0.5)


# Sizes and machine


def test_a_plain_step_reads_what_the_graph_holds_but_rows_of_the_embedding(tmp_path: Path) -> None:
    for tied in (False, True):
        out = build_bundle(random_checkpoint(tmp_path / f"c{tied}", seed=3, tied=tied), tmp_path / f"b{tied}")
        bundle = open_bundle(out)
        spec, tensors = bundle.manifest.model, external_bytes(bundle.backbone)
        whole = sum(tensors.values())
        embedding = 4 * spec.vocab_size * spec.hidden_size
        skipped = 0 if tied else embedding - 4 * spec.hidden_size
        assert step_bytes(bundle, 0).weights == whole - skipped
        more = step_bytes(bundle, 10)
        width = sum(2 * m.num_kv_heads * m.head_dim for _, m in spec.cached_layers() if m.kind == "attention")
        assert more.cache == 10 * 4 * width
        assert more.total == more.weights + more.cache + 2 * spec.state_bytes_per_sequence


def test_a_step_reads_the_experts_of_one_token_alone(tmp_path: Path) -> None:
    bundle = open_bundle(build_bundle(qwen3_5_moe_checkpoint(tmp_path / "c", seed=1), tmp_path / "b"))
    tensors = external_bytes(bundle.backbone)
    mlp = bundle.manifest.model.layers[0].mlp
    assert mlp.kind == "moe"
    experts = sum(size for name, size in tensors.items() if ".experts." in name)
    assert experts, "control: leaving experts out makes a difference"
    assert mlp.top_k < mlp.experts
    embedding = tensors["embedding"] - 4 * bundle.manifest.model.hidden_size
    others = sum(tensors.values()) - embedding - experts
    assert not bundle.manifest.model.tied_head
    assert step_bytes(bundle, 0).weights == others + experts * mlp.top_k // mlp.experts


def external_bytes(graph: Path) -> dict[str, int]:
    found = ir.load(graph).graph.initializers.items()
    return {name: v.const_value.nbytes for name, v in found if isinstance(v.const_value, ir.ExternalTensor)}


def test_what_a_generation_keeps_grows_with_its_tokens(bundle: Path) -> None:
    opened = open_bundle(bundle)
    few, many = sizes_of(opened, 10, 3), sizes_of(opened, 20, 3)
    assert few.weights == (bundle / "graphs" / "weights.data").stat().st_size
    assert many.caches / few.caches == pytest.approx(24 / 14)
    assert many.states == few.states > sizes_of(opened, 10, 0).states
    twice = sizes_of(opened, 10, 3, paths=2)
    assert (twice.weights, twice.caches, twice.states) == (few.weights, 2 * few.caches, 2 * few.states)
    assert few.total == few.weights + few.caches + few.states


def test_cores_and_instruction_sets_are_read_from_cpuinfo() -> None:
    block = (
        "processor : {}\nmodel name : Secret CPU\nphysical id : 0\ncore id : {}\nflags : fpu avx2 avx512f amx_tile\n"
    )
    text = "\n".join(block.format(number, number // 2) for number in range(4))
    assert machine.physical_cores(text) == 2
    assert machine.instruction_sets(text) == {"avx2": True, "avx512f": True, "avx512_vnni": False, "amx": True}
    assert not any(machine.instruction_sets("flags : fpu sse2").values()), "control: an old machine has none"
    assert machine.peak_bytes() >= machine.resident_bytes() // 2 > 0


def test_bandwidth_is_bytes_over_the_best_pass() -> None:
    looks = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
    measured = machine.ReadBandwidth(2, size=1 << 10, clock=lambda: next(looks))
    assert measured() == (1 << 10) / 2.0
    assert "2 parts" in measured.how


# The command


def run_json(arguments: Sequence[str], file: Path) -> dict[str, Any]:
    cli.bench.main([*arguments, "--json", str(file)], "mtp-run bench", standalone_mode=False)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def counted(result: dict[str, Any]) -> list[Any]:
    return [(case["draft_tokens"], case["forced_acceptance"], case["stats"]) for case in result["cases"]]


def test_the_command_of_the_json_line_repeats_the_benchmark(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(bundle), *SMALL, "--draft-tokens", "1,3", "--force-accept", "0.5", "--seed", "4"]
    first = run_json(arguments, tmp_path / "first.json")
    words = shlex.split(first["command"])
    assert words[:3] == ["mtp-run", "bench", str(bundle)]
    again = run_json(words[2:], tmp_path / "again.json")
    assert again["command"] == first["command"]
    assert again["tokens_sha256"] == first["tokens_sha256"]
    assert counted(again) == counted(first)
    other = run_json([*words[2:], "--seed", "5"], tmp_path / "other.json")
    assert counted(other) != counted(first), "control: another seed forces other drafts"
    assert f"repeat: {first['command']}" in capsys.readouterr().out


def test_the_json_line_has_everything_and_no_name_of_the_machine(bundle: Path, tmp_path: Path) -> None:
    done = run_command("mtp-run", "bench", bundle, *SMALL, "--draft-tokens", "0,2", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert [(case["draft_tokens"], case["forced_acceptance"]) for case in found["cases"]] == [(0, None), (2, None)]
    for case in found["cases"]:
        assert {"prefill_tokens_per_s", "decode_tokens_per_s", "python_us_per_cycle", "draft_ms", "verify_ms"} <= set(
            case["figures"]
        )
        assert all(v["least"] <= v["median"] <= v["greatest"] for v in case["figures"].values())
        assert sum(int(n) * count for n, count in case["stats"]["emitted_histogram"].items()) == 11
    assert found["prompt_tokens"] == [6]
    assert "made-up token ids, since the bundle has no tokenizer" in found["prompt_source"]
    assert found["memory"]["peak_bytes"] >= found["memory"]["resident_after_loading_bytes"]
    assert found["roofline"]["step_bytes"] > 0
    assert found["threads"] == found["roofline"]["threads"] == 1
    assert found["versions"]["onnxruntime"]
    assert set(found["machine"]["instruction_sets"]) == {"avx2", "avx512f", "avx512_vnni", "amx"}
    names = [
        line.split(":")[1].strip() for line in machine.read_cpuinfo().splitlines() if line.startswith("model name")
    ]
    assert not [name for name in (platform.node(), *names) if name and name in text]
    assert "roofline:" in done.stdout
    assert done.stdout.startswith("| drafts | K |")


def test_auto_is_a_case_with_the_costs_that_it_knew(bundle: Path, tmp_path: Path) -> None:
    shares = ["--draft-tokens", "1,auto", "--force-accept", "1"]
    result = run_json([str(bundle), *SMALL, *shares], tmp_path / "o")
    assert [case["draft_tokens"] for case in result["cases"]] == [0, 1, "auto"]
    (auto,) = (case["stats"]["draft_tokens_chosen"] for case in result["cases"] if case["draft_tokens"] == "auto")
    assert sum(auto.values()) == result["cases"][2]["stats"]["cycles"]
    assert len(result["cycle_costs_s"]["verify"]) == 4
    assert result["memory"]["states_bytes"] == sizes_of(open_bundle(bundle), 18, 3).states, "K may be the largest"
    assert "--draft-tokens 1,auto" in result["command"]
    fixed = run_json([str(bundle), *SMALL, "--draft-tokens", "1"], tmp_path / "o")
    assert fixed["cycle_costs_s"] is None, "control: a fixed K knows none"


def test_the_acceptance_that_the_build_measured_is_not_expected_of_forced_drafts(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    honest = model.auto.policy

    def remembers(*arguments: Any, measured: bool, **options: Any) -> Any:
        asked.append(measured)
        return honest(*arguments, measured=measured, **options)

    monkeypatch.setattr(model.auto, "policy", remembers)
    for case in (Case("auto"), Case("auto", 0.5)):
        measure(model, plan(case), no_bandwidth)
    assert asked == [True, True, False, False], "the warm-up and one round each"


def test_a_bundle_with_a_tokenizer_gets_text_of_the_asked_length(tmp_path: Path) -> None:
    tokenizer = tinytext_tokenizer([*"abcdefghijklmnopqrstuvwxyzATIW .,:\n"])
    checkpoint = partial_checkpoint(tmp_path / "c", tokenizer=tokenizer)
    out = build_bundle(checkpoint, tmp_path / "b", draft_tokens=1, max_model_len=600)
    result = run_json([str(out), *SMALL[2:], "--prompt-tokens", "500", "--draft-tokens", "1"], tmp_path / "o")
    assert result["prompt_tokens"] == [500], "more than the text has, so it is repeated"
    assert "a text that the tool brings" in result["prompt_source"]


def test_prompts_of_a_file_are_taken_as_they_are(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [5, 6, 20]}\n{"prompt_ids": [1], "id": "b"}\n')
    arguments = [str(bundle), *SMALL[2:], "--draft-tokens", "1", "--prompts", str(file)]
    assert run_json(arguments, tmp_path / "o")["prompt_tokens"] == [3, 1]
    file.write_text('{"prompt_ids": [5], "draft_tokens": 2}\n')
    with refused("draft_tokens = 2", "leave it out"):
        run_json(arguments, tmp_path / "o")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--draft-tokens", "1,4"], ("asks for 4", "built for 0 to 3")),
        (["--prompt-tokens", "60"], ("60 tokens and 12 new ones are 72", "holds 64")),
        (["--draft-branches", "2"], ("asks for 2", "runs 2 sequences together")),
        (["--json", "/nowhere/out.json"], ("--json is /nowhere/out.json", "cannot be written")),
    ],
)
def test_what_the_bundle_cannot_do_is_refused_before_anything_runs(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], parts: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cli, "open_model", lambda *_: pytest.fail("the engine was opened"))
    with refused(*parts):
        cli.bench.main([str(bundle), *SMALL, *options], standalone_mode=False)


def test_a_bundle_without_a_head_is_measured_plain_and_refused_with_drafts(tmp_path: Path) -> None:
    out = build_bundle(partial_checkpoint(tmp_path / "c"), tmp_path / "b", mtp=False)
    with refused("asks for 3", "without an MTP head"):
        run_json([str(out), *SMALL], tmp_path / "o")
    with refused("asks for auto", "without an MTP head"):
        run_json([str(out), *SMALL, "--draft-tokens", "0,auto"], tmp_path / "o")
    result = run_json([str(out), *SMALL, "--draft-tokens", "0"], tmp_path / "o")
    assert [case["draft_tokens"] for case in result["cases"]] == [0]


def test_usage_that_cannot_be_meant_is_refused(bundle: Path) -> None:
    both = run_command("mtp-run", "bench", bundle, "--prompts", "x.jsonl", "--prompt-tokens", "3")
    command_refused(both, "--prompts or --prompt-tokens, not both", code=2)
    with pytest.raises(click.UsageError, match="add a K above 0"):
        cli.bench.main([str(bundle), "--draft-tokens", "0", "--force-accept", "1"], standalone_mode=False)


# The picture


def rows_of(*cases: Case) -> Any:
    return summarise([{case: [an_answer(1.0, cycle(1.0 + i, 2))] for i, case in enumerate((PLAIN, *cases))}])


def test_every_acceptance_is_a_line_that_begins_at_plain_decoding() -> None:
    lines = lines_of(rows_of(Case(1, 1.0), Case(2, 1.0), Case(1, 0.5)))
    assert {label: line[0] for label, line in lines.items()} == {
        "forced acceptance 1": [0, 1, 2],
        "forced acceptance 0.5": [0, 1],
    }
    assert lines["forced acceptance 1"][1] == pytest.approx([2.0, 1.0, 2 / 3])
    assert list(lines_of(rows_of())) == ["plain decoding"]


def test_auto_has_no_k_and_is_drawn_as_a_level() -> None:
    rows = rows_of(Case(1, 0.5), Case("auto", 0.5), Case("auto", 1.0))
    lines = lines_of(rows)
    assert {label: line[0] for label, line in lines.items()} == {
        "forced acceptance 0.5": [0, 1],
        "forced acceptance 1": [0],
    }
    assert levels_of(rows) == pytest.approx({"forced acceptance 0.5": 2 / 3, "forced acceptance 1": 0.5})
    assert levels_of(rows_of(Case(1))) == {}, "control: a fixed K is none"


def test_a_picture_is_written(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    picture = tmp_path / "out.png"
    cli.bench.main([str(bundle), *SMALL, "--draft-tokens", "1,auto", "--plot", str(picture)], standalone_mode=False)
    assert picture.read_bytes().startswith(b"\x89PNG")
    draw(rows_of(Case(1)), "title", tmp_path / "out.SVG")
    assert b"<svg " in (tmp_path / "out.SVG").read_bytes()


@pytest.mark.parametrize("name", ["out.html", "out.jpg", "out"])
def test_a_picture_of_another_kind_is_refused_before_anything_runs(bundle: Path, tmp_path: Path, name: str) -> None:
    with refused("--plot is", name, "ends in .png or .svg"):
        cli.bench.main([str(bundle), "--plot", str(tmp_path / name)], standalone_mode=False)


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_tools.bench.plot.find_spec", lambda name: None)
    with refused("matplotlib, which is not installed", "mtp-export[bench]"):
        cli.bench.main([str(bundle), "--plot", str(tmp_path / "o.png")], standalone_mode=False)


def test_the_tokens_of_a_forced_answer_are_those_of_plain_decoding(model: Model) -> None:
    (round_,) = measure(model, plan(Case(3, 0.5), Case(2, 1.0)), no_bandwidth).rounds
    assert len({answers[0].token_ids for answers in round_.values()}) == 1
    assert np.unique([len(answers[0].token_ids) for answers in round_.values()]).tolist() == [NEW]
