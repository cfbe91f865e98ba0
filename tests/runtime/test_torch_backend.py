"""Generating through PyTorch on a CPU: whole cycles of the backend say and count what ONNX Runtime's loop does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_engines.backends.options import EngineOptions
from mtp_engines.errors import BundleError
from mtp_runtime import Emitted, Finished, Model, load
from mtp_runtime.loop import WholeCycles
from tests.fixtures.checkpoints import markov_checkpoint, partial_checkpoint, tinytext_tokenizer
from tests.runtime.parts import counts
from tests.support import build_bundle, command_refused, load_model, refused, run_command

LAYERS = ["linear_attention", "full_attention"]
TORCH = EngineOptions(backend="torch", device="cpu", threads=1)
STOP_PIECES = ("A", "bc", "dS", "TO", "P!", "ef", "gh")
PROMPT = [5, 6, 20]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """`threads` of the options sets PyTorch's for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _pair(place: Path, make: Any, build: dict[str, Any] | None = None, **options: Any) -> tuple[Model, Model]:
    """The same bundle on ONNX Runtime and on PyTorch."""
    make(place / "checkpoint", layer_types=LAYERS, **options)
    bundle = build_bundle(place / "checkpoint", place / "bundle", draft_tokens=3, **(build or {}))
    return load_model(bundle), load(bundle, options=TORCH)


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """A head that is right sometimes."""
    return _pair(tmp_path_factory.mktemp("partial"), partial_checkpoint, noise=0.2, head_noise=1.0)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """With room for a second path."""
    place = tmp_path_factory.mktemp("trees")
    return _pair(place, partial_checkpoint, build={"max_batch_size": 2}, noise=0.2, head_noise=1.0)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """The chain t + 1 with a perfect head, text, and the end token 30."""
    tokenizer = tinytext_tokenizer(STOP_PIECES)
    return _pair(tmp_path_factory.mktemp("chain"), markov_checkpoint, tokenizer=tokenizer, eos=30)


def said(finished: Finished) -> tuple[Any, ...]:
    """Everything but the times."""
    return finished.token_ids, finished.text, finished.finish_reason, counts(finished)


def test_the_options_choose_the_engine(partial: tuple[Model, Model]) -> None:
    assert [type(model.engine).__name__ for model in partial] == ["CpuEngine", "TorchEngine"]


@pytest.mark.parametrize(
    ("drafter", "draft_tokens"),
    [("none", 0), *((name, k) for name in ("mtp", "ngram", "mtp+ngram") for k in (1, 2, 3))],
)
def test_ids_and_counts_are_those_of_onnx_runtime(
    partial: tuple[Model, Model], drafter: str, draft_tokens: int
) -> None:
    """With the head alone the backend runs whole cycles, which draft the whole K to the end; the ids are the same."""
    theirs, ours = (
        model.complete(prompt_ids=PROMPT, max_new_tokens=19, draft_tokens=draft_tokens, drafter=drafter)
        for model in partial
    )
    assert ours.token_ids == theirs.token_ids
    assert ours.stats.drafter == theirs.stats.drafter
    assert ours.stats.cycles == theirs.stats.cycles
    assert 0 <= ours.stats.accepted - theirs.stats.accepted <= 1
    # The last cycles draft more than there is room to deliver: up to K more, K - 1 more, and so on.
    assert 0 <= ours.stats.drafted - theirs.stats.drafted <= (sum(range(draft_tokens + 1)) if drafter == "mtp" else 0)
    if drafter == "mtp":
        assert ours.stats.accepted > 0


@pytest.mark.parametrize(("prompt", "options"), [([50, 8, 23], {}), ([9, 9, 9], {"temperature": 0.8, "seed": 3})])
def test_tree_drafts_say_and_count_what_they_do_on_onnx_runtime(
    trees: tuple[Model, Model], prompt: list[int], options: Any
) -> None:
    """Paths take over one another's rows and states."""
    theirs, ours = (
        model.complete(prompt_ids=prompt, max_new_tokens=12, draft_tokens=2, draft_branches=1, **options)
        for model in trees
    )
    assert said(ours) == said(theirs)
    assert ours.stats.rescued > 0


@pytest.mark.parametrize("draft_tokens", [0, 2, 3])
@pytest.mark.parametrize(
    ("stop", "text", "count"), [("STOP", "bcd", 4), ("S", "bcd", 2), (["gh"], "bcdSTOP!ef", 6), ("STOPP", None, 6)]
)
def test_a_stop_text_inside_a_block(
    chain: tuple[Model, Model], stop: str | list[str], text: str | None, count: int, draft_tokens: int
) -> None:
    theirs, ours = (
        model.complete(prompt="A", max_new_tokens=6, draft_tokens=draft_tokens, stop=stop) for model in chain
    )
    assert said(ours)[:3] == said(theirs)[:3]
    assert len(ours.token_ids) == count
    assert text is None or ours.text == text


@pytest.mark.parametrize("draft_tokens", range(4))
@pytest.mark.parametrize("start", [24, 25, 26, 27])
def test_an_end_token_inside_a_block(chain: tuple[Model, Model], start: int, draft_tokens: int) -> None:
    """The ids end with it, wherever in the block it stands, and what was drafted behind it does not count as kept."""
    theirs, ours = (model.complete(prompt_ids=[start], max_new_tokens=20, draft_tokens=draft_tokens) for model in chain)
    assert said(ours)[:3] == said(theirs)[:3]
    assert ours.token_ids == tuple(range(start + 1, 31))
    assert ours.stats.accepted == theirs.stats.accepted
    assert ours.stats.emitted_histogram == theirs.stats.emitted_histogram


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_limit_inside_a_block(chain: tuple[Model, Model], limit: int) -> None:
    theirs, ours = (
        model.complete(prompt_ids=[5], max_new_tokens=limit, draft_tokens=3, ignore_eos=True) for model in chain
    )
    assert said(ours)[:3] == said(theirs)[:3]
    assert ours.token_ids == tuple(range(6, 6 + limit))
    # Where the limit cuts a block of the whole K, its last token is a draft that was kept and no bonus token.
    assert 0 <= ours.stats.accepted - theirs.stats.accepted <= 1


def test_the_context_to_its_last_token(partial: tuple[Model, Model]) -> None:
    theirs, ours = (model.complete(prompt_ids=[7] * 45, max_new_tokens=19, draft_tokens=3) for model in partial)
    assert len(ours.token_ids) == 19
    assert ours.token_ids == theirs.token_ids


def test_blocks_come_as_they_are_made(chain: tuple[Model, Model]) -> None:
    events = list(chain[1].generate(prompt_ids=[5], max_new_tokens=10, draft_tokens=3, ignore_eos=True))
    assert [event.token_ids for event in events if isinstance(event, Emitted)] == [
        (6,),
        (7, 8, 9, 10),
        (11, 12, 13, 14),
        (15,),
    ]


def test_whole_cycles_are_used_where_the_head_drafts_and_not_elsewhere(
    partial: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    right = Model.run

    def run(self: Model, *parts: Any) -> Iterator[Any]:
        used.append(any(isinstance(part, WholeCycles) for part in parts))
        return right(self, *parts)

    monkeypatch.setattr(Model, "run", run)
    for drafter, draft_tokens in (("mtp", 2), ("none", 0), ("ngram", 2), ("mtp+ngram", 2)):
        partial[1].complete(prompt_ids=PROMPT, max_new_tokens=2, draft_tokens=draft_tokens, drafter=drafter)
    partial[0].complete(prompt_ids=PROMPT, max_new_tokens=2, draft_tokens=2)
    assert used == [True, True, False, False, False]


def test_control_a_cycle_that_emits_a_token_twice_is_seen(
    partial: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_engines.backends.gpu.sequences import DeviceSequences

    right = DeviceSequences.cycle

    def wrong(self: DeviceSequences, draft_tokens: int) -> Any:
        cycle = right(self, draft_tokens)
        return replace(cycle, emitted=[[tokens[0], *tokens] for tokens in cycle.emitted])

    monkeypatch.setattr(DeviceSequences, "cycle", wrong)
    theirs, ours = (model.complete(prompt_ids=PROMPT, max_new_tokens=9, draft_tokens=2) for model in partial)
    assert ours.token_ids != theirs.token_ids


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (EngineOptions(backend="torch"), ("no CUDA device here", "--device cpu", "--backend onnxruntime")),
        (EngineOptions(backend="tensorflow"), ("no backend 'tensorflow'", "onnxruntime, torch, tensorrt")),
        (EngineOptions(backend="tensorrt", device="cpu"), ("tensorrt does not run on the device 'cpu'", "use cuda")),
    ],
)
def test_a_backend_that_is_not_here_is_refused_in_one_sentence(
    partial: tuple[Model, Model], options: EngineOptions, parts: tuple[str, ...]
) -> None:
    if options == EngineOptions(backend="torch") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with refused(*parts, error=BundleError):
        load(partial[0].bundle.directory, options=options)


def test_the_command_takes_backend_and_device(partial: tuple[Model, Model]) -> None:
    bundle = partial[0].bundle.directory
    run = ["mtp-run", "generate", bundle, "--prompt-ids", "5,6,20", "--max-new-tokens", "8", "--draft-tokens", "2"]
    theirs = run_command(*run)
    ours = run_command(*run, "--backend", "torch", "--device", "cpu")
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    assert ours.stdout == theirs.stdout != ""
    command_refused(run_command(*run, "--backend", "tensorrt", "--device", "cpu"), "does not run on the device 'cpu'")
