"""The graphs and the executor of ONNX Runtime for a GPU, run here with its CPU provider.

No GPU is used: what is tested is the lowered arithmetic, the bindings and the order of runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from tokenizers import Tokenizer

from mtp_engines.backends.gpu.caches import DenseCaches
from mtp_engines.backends.gpu.device import Device, Setup
from mtp_engines.backends.gpu.executor import Enqueue, Executor, Tensors
from mtp_engines.backends.gpu.state import DeltaStates
from mtp_engines.backends.gpu.widths import Widths
from mtp_engines.backends.onnxruntime_cpu.engine import CpuEngine
from mtp_engines.backends.onnxruntime_cpu.sessions import PROVIDERS, load_graph
from mtp_engines.backends.onnxruntime_cuda import opening
from mtp_engines.backends.onnxruntime_cuda.engine import OrtCudaEngine
from mtp_engines.backends.onnxruntime_cuda.executor import OrtExecutor, check_provider
from mtp_engines.backends.options import EngineOptions
from mtp_engines.backends.torch.engine import TorchExecutor
from mtp_engines.bundle import Bundle, open_bundle
from mtp_engines.contracts import names
from mtp_engines.errors import BundleError, ContractError, RequestError
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.onnxruntime_cuda import lower_onnxruntime_cuda
from mtp_engines.lowering.paged import lower_paged
from mtp_plugins.graph import DOMAIN, GraphBuilder
from tests.support import build_bundle, refused

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mtp"
CPU = torch.device("cpu")
TOKENS = 40
# The same float32 sums in another order: 1.7e-5 was seen on values up to 50. A wrong row moves states by over 1e-2.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The carried checkpoint, for two sequences at once."""
    out = tmp_path_factory.mktemp("onnxruntime-cuda") / "bundle"
    return open_bundle(build_bundle(CHECKPOINT, out, max_model_len=512, max_batch_size=2, draft_tokens=4))


@pytest.fixture(scope="module")
def cpu(bundle: Bundle) -> CpuEngine:
    """The engine that everything is compared with."""
    manifest = bundle.manifest
    return CpuEngine(manifest.model, manifest.limits, "exact", bundle.backbone, bundle.mtp, threads=1)


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    """Ids of held-out prompts, int64[1, 12] each."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    lines = (CHECKPOINT / "heldout.jsonl").read_text().splitlines()
    ids = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    return [np.array([line[:12]], np.int64) for line in ids if len(line) >= 12]


@pytest.fixture(scope="module", params=[True, False], ids=["grouped", "body"])
def engine(request: pytest.FixtureRequest, bundle: Bundle) -> OrtCudaEngine:
    """The engine in both forms of its attention, in float32."""
    return open_here(bundle, grouped=request.param)


def open_here(bundle: Bundle, precision: str = "fp32", grouped: bool | None = None) -> OrtCudaEngine:
    """The engine on the CPU provider."""
    manifest = bundle.manifest
    parts = manifest.model, manifest.limits, load_graph, bundle.backbone, bundle.mtp
    return OrtCudaEngine(*parts, device=CPU, precision=precision, grouped=grouped, threads=1)


def plain(engine: CpuEngine, prompt: np.ndarray, count: int = TOKENS) -> list[int]:
    """Tokens of plain decoding."""
    sequences = engine.sequences()
    block, tokens = prompt, []
    for _ in range(count):
        tokens.append(int(sequences.verify(block, 1).ids[0, 0]))
        sequences.commit(np.array([block.shape[1]]))
        block = np.array([[tokens[-1]]])
    return tokens


def by_cycles(engine: OrtCudaEngine, prompts: np.ndarray, k: int, count: int = TOKENS) -> list[list[int]]:
    """Tokens of every sequence by whole cycles."""
    sequences = engine.sequences(len(prompts))
    tokens = [[int(token)] for token in sequences.prefill(prompts, drafting=k > 0)]
    while min(map(len, tokens)) < count:
        for row, emitted in zip(tokens, sequences.cycle(k).emitted, strict=True):
            row += emitted
    return [row[:count] for row in tokens]


def by_host(engine: OrtCudaEngine, prompt: np.ndarray, k: int) -> tuple[list[int], set[int]]:
    """Tokens by verify, commit and draft, and every number of accepted drafts that came up."""
    sequences = engine.sequences()
    verified = sequences.verify(prompt, 1)
    sequences.commit(np.array([prompt.shape[1]]))
    tokens, accepted = [int(verified.ids[0, 0])], set()
    following, hidden = np.append(prompt[:, 1:], [tokens], 1), verified.hidden
    while len(tokens) < TOKENS:
        draft = sequences.draft(following, hidden, np.array([following.shape[1]]), k)[0].tolist() if k else []
        verified = sequences.verify(np.array([[tokens[-1], *draft]]), k + 1)
        kept = next((i for i in range(k) if draft[i] != verified.ids[0, i]), k)
        sequences.commit(np.array([kept + 1]))
        accepted.add(kept)
        following, hidden = verified.ids[:, : kept + 1], verified.hidden[:, : kept + 1]
        tokens += following[0].tolist()
    return tokens[:TOKENS], accepted


def test_windows_over_dense_caches_say_what_each_says_alone(
    bundle: Bundle, cpu: CpuEngine, prompts: list[np.ndarray]
) -> None:
    """Begun at different times, run together and apart, saved and restored in another's place."""
    engine = open_here(bundle, grouped=False)
    slots, count = engine.sequences(2), 24
    wanted = [plain(cpu, prompt, count) for prompt in prompts[:2]]
    assert wanted[0] != wanted[1], "control: prompts that say the same cannot be told apart"
    tokens: list[list[int]] = [[], []]

    def step(start: int, rows: np.ndarray) -> None:
        window = slots.window(start, len(rows))
        ids = window.verify(rows, 1).ids
        window.commit(np.full(len(rows), rows.shape[1]))
        for slot, chosen in enumerate(ids[:, 0].tolist(), start):
            tokens[slot].append(chosen)

    step(1, prompts[1])
    step(1, np.array([[tokens[1][-1]]]))
    step(0, prompts[0])
    while len(tokens[1]) < count / 2:
        step(0, np.array([[tokens[0][-1]], [tokens[1][-1]]]))
        step(0, np.array([[tokens[0][-1]]]))
    assert tokens == [row[: len(said)] for row, said in zip(wanted, tokens, strict=True)]
    length = int(slots.lengths[0])
    saved = slots.save(0)
    slots.restore(1, [saved])
    tokens[1] = tokens[0].copy()
    step(0, np.array([[tokens[0][-1]]] * 2))
    assert tokens[0] == tokens[1] == plain(cpu, prompts[0], len(tokens[0]))
    assert slots.lengths.tolist() == [length + 1] * 2
    with refused("cache_rows is 64", "a cache of its own", error=RequestError):
        engine.sequences(2, 64)


@pytest.mark.parametrize("k", range(5))
def test_greedy_tokens_equal_those_of_the_cpu_engine(
    engine: OrtCudaEngine, cpu: CpuEngine, prompts: list[np.ndarray], k: int
) -> None:
    reached: set[int] = set()
    for prompt in prompts[:3]:
        wanted = plain(cpu, prompt)
        assert by_cycles(engine, prompt, k) == [wanted]
        tokens, accepted = by_host(engine, prompt, k)
        assert tokens == wanted
        reached |= accepted
    assert reached == set(range(k + 1)), "these prompts no longer reach every number of accepted drafts"


def test_two_sequences_that_accept_differently_decode_as_each_alone(
    bundle: Bundle, cpu: CpuEngine, prompts: list[np.ndarray]
) -> None:
    engine = open_here(bundle)
    assert by_cycles(engine, np.concatenate(prompts[:2]), 3) == [plain(cpu, prompt) for prompt in prompts[:2]]


def test_a_prompt_longer_than_a_chunk(engine: OrtCudaEngine, cpu: CpuEngine, prompts: list[np.ndarray]) -> None:
    prompt = np.concatenate(prompts[:25], axis=1)
    assert prompt.shape[1] > engine.limits.prefill_chunk
    assert by_cycles(engine, prompt, 2, 12) == [plain(cpu, prompt, 12)]


def states(engine: OrtCudaEngine, prompt: np.ndarray) -> tuple[dict[str, np.ndarray], list[int]]:
    """The committed state after some cycles, and the tokens that it has consumed."""
    sequences = engine.sequences()
    tokens = [int(sequences.prefill(prompt, drafting=True)[0])]
    for _ in range(5):
        tokens += sequences.cycle(3).emitted[0]
    return sequences.snapshot(0), [*prompt[0].tolist(), *tokens[:-1]]


def difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The greatest difference of two states of one length."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - value).max()) for name, value in wanted.items())


def test_states_equal_those_of_the_cpu_engine(engine: OrtCudaEngine, cpu: CpuEngine, prompts: list[np.ndarray]) -> None:
    found, consumed = states(engine, prompts[0])
    sequences = cpu.sequences()
    sequences.verify(np.array([consumed]), 0)
    sequences.commit(np.array([len(consumed)]))
    assert difference(found, sequences.snapshot(0)) < TOLERANCE
    sequences.reset()
    sequences.verify(np.array([[*consumed[:-1], consumed[0]]]), 0)
    sequences.commit(np.array([len(consumed)]))
    assert difference(found, sequences.snapshot(0)) > 100 * TOLERANCE, "control: this cannot see one wrong token"


def test_half_precision_does_not_depend_on_the_draft_and_stays_near(
    bundle: Bundle, cpu: CpuEngine, prompts: list[np.ndarray]
) -> None:
    engine = open_here(bundle, "fp16")
    wanted = by_cycles(engine, prompts[0], 0)
    assert all(by_cycles(engine, prompts[0], k) == wanted for k in (1, 3))
    hidden = [x.sequences().verify(prompts[0], 0).hidden for x in (engine, cpu)]
    # Weights of 11 bits: 1.2e-3 was seen. Another token moves hidden states by more than 1.
    assert 1e-5 < np.abs(hidden[0] - hidden[1]).max() < 2e-2
    other = cpu.sequences().verify(prompts[1], 0).hidden
    assert np.abs(hidden[0] - other).max() > 1, "control"


def moved(found: dict[str, np.ndarray], right: dict[str, np.ndarray], kind: str) -> bool:
    """Whether every state of a kind is another one; caches are compared over the rows that both have."""
    pairs = [(found[name], right[name]) for name in right if kind in name]
    rows = [min(a.shape[1], b.shape[1]) for a, b in pairs]
    pairs = [(a[:, :count], b[:, :count]) for (a, b), count in zip(pairs, rows, strict=True)]
    return bool(pairs) and all(np.abs(a - b).max() > 100 * TOLERANCE for a, b in pairs)


class Faulty:
    """An executor that is given other tensors than the runner means."""

    paged, capturable = False, False

    def __init__(self, executor: Executor, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.device, self.cache_dtype = executor.device, executor.cache_dtype
        self._executor, self._name, self._change = executor, name, change

    def bind(self, graph: str, feeds: Tensors, into: Tensors) -> Enqueue:
        if graph != "backbone":
            return self._executor.bind(graph, feeds, into)
        wrong = torch.zeros_like(feeds[self._name])
        run = self._executor.bind("backbone", {**feeds, self._name: wrong}, into)

        def enqueue() -> None:
            wrong.copy_(self._change(feeds[self._name]))
            run()

        return enqueue


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (names.ACCEPTED_ROWS, lambda rows: (rows - 1).clamp_min(0)),
        (names.ACCEPTED_ROWS, lambda rows: (rows + 1) * (rows > 0)),
        (names.KEPT_ROWS, torch.zeros_like),
        (names.KEPT_ROWS, lambda rows: torch.full_like(rows, 5)),
        (names.PAST_LENGTH, lambda rows: (rows - 1).clamp_min(0)),
    ],
    ids=["one accepted row too few", "one too many", "kept rows ignored", "verify rows kept at once", "length"],
)
def test_control_wrong_counts_change_the_states(
    bundle: Bundle,
    cpu: CpuEngine,
    prompts: list[np.ndarray],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    engine = open_here(bundle, grouped=True)
    right, _ = states(engine, prompts[0])
    good = engine._setup.executor
    engine._setup = dataclasses.replace(engine._setup, executor=Faulty(good, name, lambda rows: rows))
    engine._idle.clear()
    assert difference(states(engine, prompts[0])[0], right) == 0, "control: the detour alone changes nothing"
    engine._setup = dataclasses.replace(engine._setup, executor=Faulty(good, name, change))
    engine._idle.clear()
    wrong, _ = states(engine, prompts[0])
    # Delta layers stand before the only attention layer, so a wrong length moves nothing but the caches.
    assert moved(wrong, right, "key_values" if name == names.PAST_LENGTH else "recurrent")


def test_control_staged_sets_that_do_not_change_places_are_noticed(
    bundle: Bundle, prompts: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_here(bundle, grouped=True)
    right, _ = states(engine, prompts[0])
    into = DeltaStates.into
    engine._idle.clear()
    monkeypatch.setattr(DeltaStates, "into", lambda self, newest: into(self, 1 - newest))
    wrong, _ = states(engine, prompts[0])
    assert moved(wrong, right, "recurrent")


def executors(bundle: Bundle, grouped: bool) -> tuple[TorchExecutor, OrtExecutor]:
    """The backbone on PyTorch, whose operators run by their bodies, and on ONNX Runtime."""

    def body(path: Path) -> ir.Model:
        return without_head(load_graph(path))

    paged = lower_paged(body(bundle.backbone), 5)
    dense = lower_onnxruntime_cuda(body(bundle.backbone), 5, grouped=grouped)
    torch_executor = TorchExecutor({"backbone": paged}, CPU, torch.float32)
    folder = bundle.backbone.parent
    return torch_executor, OrtExecutor(
        {"backbone": dense}, folder, CPU, torch.float32, provider="CPUExecutionProvider", threads=1
    )


@pytest.mark.parametrize(("rows", "accepted", "kept"), [(5, (3, 0), (0, 0)), (5, (5, 1), (2, 5)), (9, (0, 4), (9, 6))])
def test_a_call_does_what_the_deferred_operators_say(
    bundle: Bundle, rows: int, accepted: tuple[int, int], kept: tuple[int, int]
) -> None:
    """With random states, partly kept rows, rows beyond the staged capacity, and infinities behind the accepted."""
    manifest = bundle.manifest
    results = []
    for executor in executors(bundle, grouped=False):
        device = Device.empty(Setup(executor, manifest.model, manifest.limits, Widths((5,), (9,))), 2)
        generator = torch.Generator().manual_seed(0)
        for name, state in device.delta.states.items():
            state.copy_(torch.randn(state.shape, generator=generator).mul_(0.3 if "recurrent" in name else 1.0))
        for name, staged in device.delta.staged[0].items():
            drawn = torch.randn(staged.shape, generator=generator)
            drawn = torch.nn.functional.normalize(drawn, dim=-1) if "key" in name else drawn
            staged.copy_(-drawn.abs() if "decay" in name else drawn.sigmoid() if "beta" in name else drawn)
            for sequence, count in enumerate(accepted):
                staged[sequence, count:] = torch.inf
        run = device.target(rows)
        device.pages.reserve(np.full(2, rows))
        run.tokens.copy_(torch.randint(0, 1000, run.tokens.shape, generator=generator))
        run.kept.copy_(torch.tensor(kept))
        device.delta.accepted.copy_(torch.tensor(accepted))
        run.enqueue(0)
        room = {name: x[:, :rows] for name, x in device.delta.staged[1].items()}
        results.append({names.HIDDEN: run.hidden, **device.delta.states, **room})
    for name, wanted in results[0].items():
        torch.testing.assert_close(results[1][name], wanted, rtol=0, atol=TOLERANCE, msg=name)
        assert wanted.isfinite().all()
        assert wanted.abs().max() > 100 * TOLERANCE, "control: a result of zeros would say nothing"


def test_lowered_graphs_take_and_give_what_those_of_pytorch_do(bundle: Bundle) -> None:
    for path in (bundle.backbone, *bundle.mtp):
        paged = lower_paged(without_head(load_graph(path)), 5).graph
        for grouped in (True, False):
            graph = lower_onnxruntime_cuda(without_head(load_graph(path)), 5, grouped=grouped).graph
            assert {x.name for x in graph.inputs} == {x.name for x in paged.inputs} - {names.BLOCK_TABLE}
            assert [x.name for x in graph.outputs] == [x.name for x in paged.outputs]
            types = {x.name: x.type for x in (*paged.inputs, *paged.outputs)}
            assert all(x.type == types[x.name] for x in (*graph.inputs, *graph.outputs))
            assert not [node for node in graph if node.domain == DOMAIN]
            used = {node.op_type for node in graph}
            assert ("GroupQueryAttention" in used) is grouped
            assert ("TensorScatter" in used) is not grouped


def test_attention_is_grouped_where_the_cuda_kernel_takes_it(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtp_engines.backends.onnxruntime_cuda import engine as module

    class StopError(Exception):
        pass

    def chosen(precision: str, batch: int) -> bool:
        seen: list[bool] = []

        def lower(model: ir.Model, rows: int, *, grouped: bool) -> ir.Model:
            seen.append(grouped)
            raise StopError

        monkeypatch.setattr(module, "lower_onnxruntime_cuda", lower)
        manifest = bundle.manifest
        limits = dataclasses.replace(manifest.limits, max_batch_size=batch)
        with pytest.raises(StopError):
            module.OrtCudaEngine(
                manifest.model, limits, load_graph, bundle.backbone, (), device=CPU, precision=precision
            )
        return seen[0]

    found = {(precision, batch): chosen(precision, batch) for precision in ("fp32", "fp16") for batch in (1, 2)}
    assert found == {("fp32", 1): False, ("fp32", 2): False, ("fp16", 1): True, ("fp16", 2): False}


@pytest.mark.parametrize("operator", ["LatentAttention", "RoutedExperts"])
def test_a_layer_without_a_form_is_refused_by_name(operator: str) -> None:
    g = GraphBuilder("layer")
    g.outputs.append(g.op(operator, g.input("x", "float32", [1]), domain=DOMAIN))
    name = {"LatentAttention": "latent attention", "RoutedExperts": "routed experts"}[operator]
    with refused(name, "--backend onnxruntime", error=BundleError):
        lower_onnxruntime_cuda(g.model(domains=[DOMAIN]), 5, grouped=True)


def test_dense_caches_refuse_rows_beyond_their_room(bundle: Bundle) -> None:
    limits = bundle.manifest.limits
    caches = DenseCaches.empty({}, limits, 2, CPU, torch.float32)
    room = limits.capacity + limits.prefill_chunk
    caches.reserve(np.array([room, 1]))
    with refused(f"Sequence 1 needs {room + 1} rows", "--max-model-len", error=ContractError):
        caches.reserve(np.array([0, room + 1]))


def test_a_session_that_fell_back_to_the_cpu_is_refused() -> None:
    g = GraphBuilder("copy")
    g.output("y", g.op("Identity", g.input("x", "float32", [1])), "float32", [1])
    session = ort.InferenceSession(ir.to_proto(g.model()).SerializeToString(), providers=PROVIDERS)
    check_provider(session, "CPUExecutionProvider")
    with refused("could not load its CUDAExecutionProvider", "onnxruntime-gpu", error=BundleError):
        check_provider(session, "CUDAExecutionProvider")


def test_an_empty_tensor_is_bound_as_one() -> None:
    """Some heads take their own states or the target's, and the other input is empty."""
    g = GraphBuilder("join")
    parts = [g.input(name, "float32", ["batch", f"{name}_rows", 2]) for name in ("a", "b")]
    g.output("y", g.op("Concat", *parts, axis=1), "float32", ["batch", "rows", 2])
    executor = OrtExecutor({"head": g.model()}, Path(), CPU, torch.float32, provider="CPUExecutionProvider")
    feeds = {"a": torch.zeros((1, 0, 2)), "b": torch.ones((1, 3, 2)), "unknown": torch.zeros(1)}
    out = torch.zeros((1, 3, 2))
    enqueue = executor.bind("head", feeds, {"y": out})
    for value in (1.0, 2.0):
        feeds["b"].fill_(value)
        enqueue()
        assert (out == value).all(), "a run reads and writes where the tensors lie"


def test_opening_names_what_is_missing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: PROVIDERS)
    with refused("has no CUDA provider", "onnxruntime-gpu", error=BundleError):
        opening.open_bundle_here(bundle, EngineOptions())
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("no CUDA device", "--device cpu", error=BundleError):
        opening.open_bundle_here(bundle, EngineOptions())
