"""The arithmetic of sampling with speculative decoding: options, laws, random streams, acceptance."""

from mtp_runtime.sampling.accept import Verdict, coupled, coupled_draft, drawn_draft, rejection
from mtp_runtime.sampling.context import Context
from mtp_runtime.sampling.law import Law
from mtp_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from mtp_runtime.sampling.lossy import lossy_relaxed, lossy_typical
from mtp_runtime.sampling.options import SamplingOptions
from mtp_runtime.sampling.stream import Purpose, Stream
from mtp_runtime.sampling.transforms import Rows, law_from_logits, target_law

__all__ = [
    "Context",
    "Law",
    "Purpose",
    "Rows",
    "SamplingOptions",
    "Stream",
    "TokenLogprobs",
    "Verdict",
    "coupled",
    "coupled_draft",
    "drawn_draft",
    "law_from_logits",
    "lossy_relaxed",
    "lossy_typical",
    "rejection",
    "target_law",
    "token_logprobs",
]
