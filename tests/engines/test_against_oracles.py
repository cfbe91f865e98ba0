"""The engine against the float64 oracle and transformers, and one control for each convention."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from mtp_engines.contracts import names
from tests.engines.conftest import Case
from tests.fixtures.head_rows import every_row
from tests.oracles.float64 import FAULTS, Oracle, load_checkpoint

IDS: list[int] = np.random.default_rng(0).integers(0, 112, 23).tolist()
# float32 rounding over four layers stays under 3e-4 on values up to 22; the mildest fault that float32
# can show at all moves them by more than 3e-2.
TOLERANCE = 1e-3
VISIBLE = 3e-2
# Too small for float32 to see: moving the norm's epsilon out of the root changes a logit by 2e-5.
BELOW_FLOAT32 = {"l2norm_eps_outside"}
# These concern what is kept between two calls; the tests of states and of drafts hold them.
BETWEEN_CALLS = {"conv_state_post_silu", "mtp_rejected_rows_kept", "chained_rows_kept", "state_not_rolled_back"}


def target(case: Case, blocks: list[int]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Hidden states, logits and final state of IDS, run in blocks of the given sizes."""
    sequences = case.model.engine.sequences()
    hidden, start = [], 0
    for size in blocks:
        hidden.append(sequences.verify(np.array([IDS[start : start + size]]), 0).hidden[0].copy())
        sequences.commit(np.array([size]))
        start += size
    rows = np.concatenate(hidden)
    return rows, sequences.logits(rows), sequences.snapshot(0)


def head_logits(case: Case, hidden: np.ndarray) -> np.ndarray:
    """Logits of the head over a whole sequence: row p takes token p + 1 and hidden state p."""
    mtp = case.model.engine.sessions.mtp[0]  # type: ignore[attr-defined]
    spec = case.model.engine.spec
    mixer = spec.mtp.layers[0].mixer
    cache = np.zeros((1, mixer.num_kv_heads, 64, mixer.head_dim), np.float32)
    feed = {
        names.INPUT_IDS: np.array([IDS[1:]]),
        names.HIDDEN: hidden[None, :-1].astype(np.float32),
        names.POSITION_IDS: np.arange(len(IDS) - 1)[None],
        names.PAST_LENGTH: np.zeros(1, np.int64),
        names.past_key(0): cache,
        names.past_value(0): cache.copy(),
    }
    return case.model.engine.sequences().logits(every_row(mtp, feed)[names.HIDDEN_OUT][0])


@pytest.mark.parametrize("blocks", [[23], [1] * 23, [8, 1, 5, 9]], ids=["whole", "one by one", "uneven"])
def test_the_target_equals_the_float64_oracle(case: Case, blocks: list[int]) -> None:
    want = Oracle(load_checkpoint(case.checkpoint)).forward(IDS)
    hidden, logits, states = target(case, blocks)
    np.testing.assert_allclose(hidden, want.hidden, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits, want.logits, rtol=0, atol=TOLERANCE)
    for index, state in enumerate(want.states):
        if state.kind == "full":
            pairs = [
                (names.past_key(index), state.key.transpose(1, 0, 2)),
                (names.past_value(index), state.value.transpose(1, 0, 2)),
            ]
        else:
            pairs = [(names.past_conv(index), state.conv), (names.past_recurrent(index), state.recurrent)]
        for name, expected in pairs:
            np.testing.assert_allclose(states[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)


def test_the_head_equals_the_float64_oracle_over_a_whole_sequence(case: Case) -> None:
    oracle = Oracle(load_checkpoint(case.checkpoint))
    want = oracle.head_over(IDS)
    got = head_logits(case, oracle.forward(IDS).hidden)
    assert len(got) >= 2, "one row would hide every fault of attention"
    np.testing.assert_allclose(got, want.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - BELOW_FLOAT32 - BETWEEN_CALLS))
def test_control_a_broken_convention_is_noticed(case: Case, fault: str) -> None:
    checkpoint = load_checkpoint(case.checkpoint)
    wrong = Oracle(checkpoint, fault)
    _, logits, _ = target(case, [23])
    in_target = np.abs(logits - wrong.forward(IDS).logits).max()
    in_head = np.abs(head_logits(case, Oracle(checkpoint).forward(IDS).hidden) - wrong.head_over(IDS).logits).max()
    config = checkpoint.config
    if fault == "repeat_not_interleave" and config.linear_num_value_heads == config.linear_num_key_heads:
        assert max(in_target, in_head) < TOLERANCE, "with as many value heads as key heads both orders are one"
    else:
        assert max(in_target, in_head) > VISIBLE, f"this test cannot see that {FAULTS[fault]}"


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4, 7])
def test_generations_accept_what_the_float64_loop_accepts(chain: Case, draft_tokens: int) -> None:
    prompt = [5, 9, 17, 3]
    want = Oracle(load_checkpoint(chain.checkpoint)).speculate(prompt, 40, draft_tokens)
    finished = chain.model.complete(prompt_ids=prompt, max_new_tokens=40, draft_tokens=draft_tokens, ignore_eos=True)
    assert list(finished.token_ids) == want.ids
    assert finished.stats.drafted == sum(want.drafted)
    assert finished.stats.accepted == sum(want.accepted)
    histogram: dict[int, int] = {}
    for count in want.accepted:
        histogram[count + 1] = histogram.get(count + 1, 0) + 1
    assert finished.stats.emitted_histogram == histogram


@pytest.mark.parametrize(
    "fault", ["mtp_rejected_rows_kept", "chained_rows_kept", "hidden_row_off_by_one", "swap_concat"]
)
def test_control_a_head_fed_wrongly_between_cycles_is_noticed(chain: Case, fault: str) -> None:
    prompt = [5, 9, 17, 3]
    finished = chain.model.complete(prompt_ids=prompt, max_new_tokens=40, draft_tokens=3, ignore_eos=True)
    wrong = Oracle(load_checkpoint(chain.checkpoint), fault).speculate(prompt, 40, 3)
    assert finished.stats.accepted != sum(wrong.accepted), f"this test cannot see that {FAULTS[fault]}"


def test_prefill_and_cached_decoding_equal_transformers(case: Case) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch and transformers are not installed")
    import torch
    from transformers import DynamicCache, Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(case.checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].numpy()
        cache = DynamicCache(config=model.config)
        steps = [
            model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True).logits[0].numpy() for token in IDS
        ]
    np.testing.assert_allclose(target(case, [23])[1], whole, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(target(case, [1] * 23)[1], np.concatenate(steps), rtol=0, atol=TOLERANCE)


def test_the_head_equals_the_generic_mtp_model_of_transformers(case: Case) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch and transformers are not installed")
    import torch
    from transformers import Qwen3_5ForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model = Qwen3_5ForCausalLM.from_pretrained(case.checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    # Two fields switch the generic head on for this family; its rename rules know the family's tensors.
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    head = MtpModel.from_pretrained(model).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([IDS]), use_cache=False).last_hidden_state
        positions = torch.arange(1, len(IDS))[None]
        cache = MtpCache(config=model.config.get_mtp_config())
        out = head.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=torch.tensor([IDS[1:]]))
        logits = model.lm_head(out)[0].numpy()
    np.testing.assert_allclose(head_logits(case, hidden[0].numpy()), logits, rtol=0, atol=TOLERANCE)
