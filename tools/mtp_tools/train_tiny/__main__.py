"""Command line: `python -m mtp_tools.train_tiny --out checkpoints/tiny-mtp`."""

import argparse
import os
import sys
from pathlib import Path

from .corpus import RecipeError, Split, load_split

STEPS = 700
SEED = 0
THREADS = 2


def main() -> int:
    """Train, save, evaluate; return the exit status."""
    options = _options()
    try:
        split = load_split(options.cache)
        _make(split, options)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _make(split: Split, options: argparse.Namespace) -> None:
    # Imported late: torch and transformers take seconds, and --help needs neither.
    from .checkpoint import save_checkpoint
    from .evaluate import evaluate
    from .prompts import cut_prompts, write_prompts
    from .report import CorpusSize, readme
    from .train import Schedule, train
    from .vocabulary import token_stream, train_tokenizer

    out: Path = options.out
    schedule = Schedule(steps=options.steps, seed=options.seed, threads=options.threads)
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mtp_tools.train_tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--cache", type=Path, default=_cache(), help="folder for downloads (%(default)s)")
    parser.add_argument("--steps", type=_positive, default=STEPS, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of weights and order (%(default)s)")
    parser.add_argument(
        "--threads", type=_positive, default=THREADS, help="CPU threads; changes rounding (%(default)s)"
    )
    return parser.parse_args()


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mtp-train-tiny"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
