"""Names of graph inputs and outputs; caches and states follow onnxruntime-genai."""

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
PAST_LENGTH = "past_length"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"
HIDDEN = "hidden_states"
"""Output of the backbone at the head's tap, and input of the head."""
HIDDEN_OUT = "hidden_states_out"
"""Output of the head after its last norm; the next chained step takes it as its input."""
ACCEPTED_ROWS = "accepted_rows"


def past_key(layer: int) -> str:
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    return f"present.{layer}.value"


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


def residual(layer: int) -> str:
    """The residual stream that enters a layer; `residual(len(layers))` leaves the last one."""
    return f"residual.{layer}"
