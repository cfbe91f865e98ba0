"""Names of graph inputs and outputs; caches and states follow onnxruntime-genai."""

from __future__ import annotations

import re

from mtp_engines.contracts.model import MtpSpec

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
PAST_LENGTH = "past_length"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"
HIDDEN = "hidden_states"
"""Output of the backbone after its final norm, and input of a head that was trained on it."""
TAP = "tap_states"
"""Output of the backbone at a tap elsewhere, and input of a head that was trained on it."""
CHAIN = "chain_states"
"""Input of a head that takes its own states another way than the target's."""
HIDDEN_OUT = "hidden_states_out"
"""Output of the head, which its vocabulary head consumes; a chained step takes it unless there is `CHAIN_OUT`."""
CHAIN_OUT = "chain_states_out"
"""Output of a head that chains on another tensor than its vocabulary head consumes."""
DRAFT_IDS = "draft_ids"
"""Output of a head with a vocabulary of its own: the best ids, in the target's numbering."""
ACCEPTED_ROWS = "accepted_rows"
"""How many staged rows of each sequence are made permanent, from the first."""
KEPT_ROWS = "kept_rows"
"""How many new rows of each sequence are made permanent at once, from the first."""
BLOCK_TABLE = "block_table"
"""int32[batch, max_pages]: the pages of each sequence in order of position."""


def tap_of(mtp: MtpSpec) -> str:
    """The output of the backbone that a head consumes, which is its input of the same name."""
    return TAP if mtp.taps else HIDDEN


def past_key(layer: int) -> str:
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    return f"present.{layer}.value"


def past_latent(layer: int) -> str:
    return f"past_key_values.{layer}.latent"


def present_latent(layer: int) -> str:
    return f"present.{layer}.latent"


def again(present: str) -> str:
    """The second name of a cache that a backend's kernel writes as key and as value."""
    return f"{present}.again"


def is_cache(name: str) -> bool:
    """Whether a graph input or output is a cache with one row a token, before or after a run."""
    return re.fullmatch(r"(past_key_values|present)\.\d+\.(key|value|latent)(\.again)?", name) is not None


def past_conv(layer: int) -> str:
    return f"past.{layer}.conv"


def past_recurrent(layer: int) -> str:
    return f"past.{layer}.recurrent"


def present_conv(layer: int) -> str:
    return f"present.{layer}.conv"


def present_recurrent(layer: int) -> str:
    return f"present.{layer}.recurrent"


def factor(layer: int, name: str) -> str:
    """A row factor: `conv` is the raw convolution input, the others are inputs of the recurrence."""
    return f"factors.{layer}.{name}"


def is_factor(name: str) -> bool:
    """Whether a graph output is a row factor."""
    return re.fullmatch(r"factors\.\d+\.\w+", name) is not None


def staged(layer: int, name: str) -> str:
    """A row factor that the last call left and this one may commit; named as in `factor`."""
    return f"staged.{layer}.{name}"


def following(layer: int, name: str) -> str:
    """A row factor that this call leaves for the next one."""
    return f"next.{layer}.{name}"


def layer_of(name: str) -> int:
    """The layer of a cache or state."""
    return int(name.split(".")[1])


def residual(layer: int) -> str:
    """The residual stream that enters a layer; `residual(len(layers))` leaves the last one."""
    return f"residual.{layer}"


def routing(layer: int | str) -> str:
    """The experts that a layer chose, int64[batch, rows, top_k]; `head` for the layer of a head."""
    return f"routing.{layer}"


HEAD_STAGES = (
    "embedding_norm",
    "hidden_norm",
    "concatenation",
    "projection",
    "attention_input",
    "attention",
    "first_residual",
    "mlp_input",
    "mlp",
    "second_residual",
    "output",
)
"""Values inside a head that tools compare, in order; a head has those that its layout has."""


def stage(name: str) -> str:
    """A value inside the head, one of `HEAD_STAGES`."""
    return f"head.{name}"
