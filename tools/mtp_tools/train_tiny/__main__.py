"""Command line: `python -m mtp_tools.train_tiny --out checkpoints/tiny-mtp`."""

import os
import sys
from pathlib import Path

import click

from mtp_engines.command import run_command
from mtp_tools.train_tiny.corpus import Split, load_split

STEPS = 700
SEED = 0
THREADS = 2


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mtp-train-tiny"


@click.command("python -m mtp_tools.train_tiny")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the checkpoint to.")
@click.option("--cache", type=click.Path(path_type=Path), default=_cache, help="Folder for downloads.")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True, help="Training steps.")
@click.option("--seed", default=SEED, show_default=True, help="Seed of weights and order.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=THREADS, show_default=True, help="CPU threads; changes rounding."
)
def main(out: Path, cache: Path, steps: int, seed: int, threads: int) -> None:
    """Train the carried checkpoint, save it, and evaluate what was saved."""
    _make(load_split(cache), out, steps, seed, threads)


def _make(split: Split, out: Path, steps: int, seed: int, threads: int) -> None:
    # Imported late: torch and transformers take seconds, and --help needs neither.
    from mtp_tools.train_tiny.checkpoint import save_checkpoint
    from mtp_tools.train_tiny.evaluate import evaluate
    from mtp_tools.train_tiny.prompts import cut_prompts, write_prompts
    from mtp_tools.train_tiny.report import CorpusSize, readme
    from mtp_tools.train_tiny.train import Schedule, train
    from mtp_tools.train_tiny.vocabulary import token_stream, train_tokenizer

    schedule = Schedule(steps=steps, seed=seed, threads=threads)
    tokenizer = train_tokenizer(split.train)
    train_tokens, held_out = token_stream(tokenizer, split.train), token_stream(tokenizer, split.held_out)
    model = train(train_tokens, schedule, report=lambda line: print(line, flush=True))
    save_checkpoint(model, out)
    tokenizer.save(str(out / "tokenizer.json"))
    write_prompts(cut_prompts(split.held_out, tokenizer), out / "heldout.jsonl")
    figures = evaluate(out, tokenizer, held_out)
    size = CorpusSize(len(split.train), len(train_tokens), len(split.held_out), len(held_out))
    text = readme(schedule, size, figures)
    (out / "README.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"largest logit difference to transformers' own loading: {figures.transformers_difference:.2e}")


if __name__ == "__main__":
    sys.exit(run_command(main))
