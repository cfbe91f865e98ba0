"""The checkpoint's README.md, with every figure taken from the run that wrote it."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from mtp_tools.train_tiny.acceptance import Acceptance
from mtp_tools.train_tiny.corpus import SOURCES
from mtp_tools.train_tiny.evaluate import BURST_TOKENS, RUN_TOKENS, Figures
from mtp_tools.train_tiny.layout import VOCAB_SIZE
from mtp_tools.train_tiny.prompts import PROMPT_COUNT, PROMPT_TOKENS
from mtp_tools.train_tiny.train import Schedule

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class CorpusSize:
    """Documents and tokens on each side of the split."""

    train_documents: int
    train_tokens: int
    held_out_documents: int
    held_out_tokens: int


def readme(schedule: Schedule, size: CorpusSize, figures: Figures) -> str:
    """Return the text of README.md."""
    return "\n\n".join(
        (
            _introduction(),
            _recipe(schedule, size),
            _figures(figures),
            _samples(figures.samples),
            _licence(),
        )
    )


def _introduction() -> str:
    return f"""# tiny-mtp: a small trained checkpoint in the Qwen3.5 layout, with an MTP head

A real, if tiny, language model for tests and relative benchmarks: its drafts are sometimes right
and sometimes wrong, at every position. It says nothing about Qwen3.5's own speed-ups.

* Keys, nesting and dtypes as in a released vision-language checkpoint, without the vision tensors:
  `model.language_model.*`, fifteen `mtp.*` tensors, tied embeddings, bf16 except `A_log` and
  `linear_attn.norm.weight`. `text_config.eos_token_id` is `<|endoftext|>`; only
  `generation_config.json` names `<|im_end|>` as well.
* Hidden 256, intermediate 704, vocabulary {VOCAB_SIZE} (byte-level BPE), three gated-delta layers and one
  gated full-attention layer. No two sizes are equal, so a swapped pair cannot go unseen.
* The chat template is there to be exercised; the model has read documentation, never a conversation."""


def _recipe(schedule: Schedule, size: CorpusSize) -> str:
    seen = schedule.steps * schedule.batch * schedule.length
    command = "PYTHONPATH=tools python -m mtp_tools.train_tiny --out checkpoints/tiny-mtp"
    command += f" --steps {schedule.steps} --seed {schedule.seed} --threads {schedule.threads}"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    sources = "\n".join(f"* {s.name} {s.version}, `{s.folder}/**/*{s.suffix}`" for s in SOURCES)
    return f"""## Recipe

```
{command}
```

{schedule.steps} steps of {schedule.batch} x {schedule.length} tokens ({seen:,} in all), \
seed {schedule.seed}, {schedule.threads} threads, Python {platform.python_version()},
{versions}.
All schedules count steps, so these versions give the same weights again on the same kind of CPU.

Text, fetched with pip as source distributions and checked by sha256:

{sources}

{size.train_documents} documents ({size.train_tokens:,} tokens) to train on; {size.held_out_documents} whole \
documents ({size.held_out_tokens:,} tokens), chosen by a hash of
their names, held out. The head learns with the backbone: its loss (weight {schedule.draft_weight}) is the \
distance to the
backbone's distribution and choice, over up to three chained steps fed with its own output."""


def _figures(figures: Figures) -> str:
    agreement = " / ".join(f"{share:.3f}" for share in figures.agreement)
    return f"""## Held-out figures

Computed in fp32 from the stored, rounded weights.

* Loss: {figures.loss_nats:.3f} nats a token.
* Agreement of draft 1 / 2 / 3 with the backbone's greedy choice, reading held-out text: {agreement}.

Greedy acceptance on the {PROMPT_COUNT} prompts of `heldout.jsonl`, {PROMPT_TOKENS} tokens each. \
A cycle emits the accepted
tokens and one bonus token; by position: share of cycles that kept that draft token.

{_table(f"first {BURST_TOKENS} tokens", figures.bursts)}

{_table(f"first {RUN_TOKENS} tokens", figures.runs)}

The burst figures are the ones to quote: long greedy runs of so small a model repeat themselves, and
only {figures.distinct_share:.2f} of the 4-grams in the {RUN_TOKENS}-token runs are distinct."""


def _table(title: str, results: Sequence[Acceptance]) -> str:
    lines = [
        f"| {title} | cycles | accepted / drafted | emitted per verify | kept by position |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        positions = " / ".join(f"{share:.3f}" for share in result.by_position)
        lines.append(
            f"| K = {result.draft_tokens} | {result.cycles} | {result.acceptance_rate:.3f} "
            f"| {result.emitted_per_verify:.2f} | {positions} |"
        )
    return "\n".join(lines)


def _samples(samples: Sequence[tuple[str, str]]) -> str:
    blocks = []
    for prompt, text in samples:
        quoted = f"{prompt}⟦{text}⟧".replace("\n", "\n    ")
        blocks.append(f"    {quoted}")
    return "## Greedy samples\n\nThe continuation is in double brackets.\n\n" + "\n\n---\n\n".join(blocks)


def _licence() -> str:
    sources = "\n".join(f"* {source.name} {source.version}: {source.licence}." for source in SOURCES)
    return f"""## Licence

The prompts are excerpts of, and the weights were trained on, documentation under these licences,
which are in the source distributions named above:

{sources}

The weights and the other files of this folder are under this repository's licence; keep the notices
above with any copy of `heldout.jsonl`.
"""
