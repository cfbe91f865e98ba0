"""The converted checkpoint against transformers' own reading of the GGUF file, and the bundle against transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from mtp_runtime.api import Model
from mtp_tools.smollm2.measure import request_of
from mtp_tools.smollm2.prompts import Prompt
from mtp_tools.smollm2.wheel import ModelError

LOGIT_TOLERANCE = 1e-4
"""Greatest difference of a logit over the greatest logit of the prompt; float32 rounding gives about 1e-6."""
_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8}
"""How far a stored weight may be from the dequantised one, over the latter."""
_ROWS = 128


@dataclass(frozen=True)
class Comparison:
    """What was compared with transformers.

    Attributes:
        tensors: how many weights equal transformers' own reading of the GGUF file.
        logits: prompt -> greatest difference of a logit over the greatest logit.
        steps: greedy tokens of each prompt.
        ties: prompts whose tokens part where transformers' best two logits are closer than the rounding.
    """

    tensors: int
    logits: dict[str, float]
    steps: int
    ties: tuple[str, ...]


def compare(
    checkpoint: Path, gguf: Path, dtype: str, model: Model, prompts: Sequence[Prompt], steps: int
) -> Comparison:
    """Compare weights, configuration, token ids, logits and greedy tokens.

    Args:
        checkpoint: the converted directory; `model` is the bundle built from it.
        dtype: what its weights are stored as.
        steps: greedy tokens of each prompt, end tokens ignored.

    Raises:
        ModelError: names the first thing that differs by more than rounding.
    """
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    oracle.eval()
    tensors = _compare_conversion(oracle, gguf, _ROUNDING[dtype])
    tokenizers: list[Any] = [
        transformers.AutoTokenizer.from_pretrained(checkpoint),
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name),
    ]
    encoded = {prompt.name: _ids(tokenizers, model, prompt) for prompt in prompts}
    logits = {name: _logit_difference(oracle, model, name, ids) for name, ids in encoded.items()}
    ties = [name for name, ids in encoded.items() if not _same_tokens(oracle, model, name, ids, steps)]
    return Comparison(tensors, logits, steps, tuple(ties))


def _compare_conversion(oracle: Any, gguf: Path, rounding: float) -> int:
    """Number of weights that transformers reads from the GGUF file and that the checkpoint holds alike."""
    reading: Any = modeling_gguf_pytorch_utils
    read = reading.load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=oracle)
    held = oracle.state_dict()
    own = set(held) - ({"lm_head.weight"} if oracle.config.tie_word_embeddings else set())
    if own != set(read["tensors"]):
        names = sorted(own ^ set(read["tensors"]))
        raise ModelError(f"The checkpoint and transformers disagree on which weights there are ({names[0]}); report.")
    for name, want in read["tensors"].items():
        if not bool(((held[name] - want).abs() <= rounding * want.abs()).all()):
            raise ModelError(f"The checkpoint's {name} is not what transformers reads from the GGUF file; report this.")
    fields = oracle.config.to_dict()
    fields |= fields["rope_parameters"]
    for name in fields.keys() & read["config"].keys():
        found, value = fields[name], read["config"][name]
        if not (math.isclose(found, value, rel_tol=1e-6) if isinstance(value, float) else found == value):
            raise ModelError(f"The checkpoint has {name} = {found!r}, transformers reads {value!r} from GGUF; report.")
    return len(read["tensors"])


def _ids(tokenizers: Sequence[Any], model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a prompt under the chat template, equal by the bundle and by transformers' two readings."""
    ours = model.prompts.encode(request_of(prompt))
    messages = [{"role": "user", "content": prompt.text}]
    for tokenizer in tokenizers:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        theirs = tokenizer(text, add_special_tokens=False).input_ids
        if theirs != ours:
            raise ModelError(f"Transformers encodes the prompt {prompt.name!r} differently from the bundle; report.")
    return ours


@torch.no_grad()
def _logit_difference(oracle: Any, model: Model, name: str, ids: list[int]) -> float:
    want = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    sequences = model.engine.sequences()
    worst = 0.0
    for start in range(0, len(ids), _ROWS):
        block = np.array([ids[start : start + _ROWS]], np.int64)
        got = sequences.logits(sequences.verify(block, 0).hidden[0])
        sequences.commit(np.array([block.shape[1]]))
        worst = max(worst, float(np.abs(got - want[start : start + _ROWS]).max()))
    worst /= float(np.abs(want).max())
    if not worst <= LOGIT_TOLERANCE:
        raise ModelError(
            f"The bundle's logits differ from transformers' by {worst:.1e} of the greatest on the prompt {name!r}, at "
            f"most {LOGIT_TOLERANCE:.0e} is allowed; report this."
        )
    return worst


def _same_tokens(oracle: Any, model: Model, name: str, ids: list[int], steps: int) -> bool:
    """Whether the greedy tokens are equal; False where they part at a tie within rounding."""
    ours = model.complete(prompt_ids=ids, max_new_tokens=steps, ignore_eos=True).token_ids
    theirs, rows = _greedy(oracle, ids, steps)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a == b:
            continue
        best = np.sort(rows[step])[-2:]
        if best[1] - best[0] > 2 * LOGIT_TOLERANCE * np.abs(rows[step]).max():
            raise ModelError(f"Greedy tokens for the prompt {name!r} part from transformers' at {step}; report this.")
        return False
    return True


@torch.no_grad()
def _greedy(oracle: Any, ids: list[int], steps: int) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
    """Greedy ids, one at a time with a cache, and the float32[vocab_size] logits that chose each."""
    cache = transformers.DynamicCache(config=oracle.config)
    fed = torch.tensor([ids])
    chosen, rows = [], []
    for _ in range(steps):
        logits = oracle(input_ids=fed, cache=cache, use_cache=True).logits[0, -1]
        rows.append(logits.numpy())
        chosen.append(int(logits.argmax()))
        fed = torch.tensor([[chosen[-1]]])
    return chosen, rows
