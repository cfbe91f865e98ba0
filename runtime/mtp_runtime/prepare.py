"""From a request to all that its generation needs, or a refusal that names the option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.drafters.choice import choose_drafter, choose_ngram
from mtp_runtime.drafters.registry import base_of
from mtp_runtime.request import AUTO, DEFAULT_DRAFT_TOKENS, DraftTokens, Request
from mtp_runtime.sampling.acceptors import LOSSY, rule_of
from mtp_runtime.sampling.decoding import Decoding
from mtp_runtime.sampling.options import SamplingOptions
from mtp_runtime.trees.options import choose_branches
from mtp_runtime.verification import VerifyMode

MOST_STOPS, LONGEST_STOP = 64, 1000
MOST_BAD_WORDS, LONGEST_BAD_WORD = 4096, 64
"""Stop texts of a request, and characters of one."""
_OPTIONS = tuple(field.name for field in fields(SamplingOptions) if field.name not in ("logit_bias", "bad_words"))
"""Options that a request has under the same name and in the same form."""


@dataclass(frozen=True)
class Prepared:
    """A request that the bundle can serve: all that was left open is settled.

    Attributes:
        prompt: its token ids.
        drafter: the name of what drafts; `none` if K is 0.
        draft_tokens: K, or `auto`.
        ngram: shortest and longest match of a lookup.
        limit: most tokens to emit.
        decoding: how tokens are chosen; its seed is still open.
        end_tokens: ids that end the answer.
        verify: how drafts are verified.
        draft_confidence: where drafts end early; 0 never.
        draft_branches: how many further paths a draft has.
    """

    prompt: list[int]
    drafter: str
    draft_tokens: DraftTokens
    ngram: tuple[int, int]
    limit: int
    decoding: Decoding
    end_tokens: frozenset[int]
    verify: VerifyMode = "rows"
    draft_confidence: float = 0.0
    draft_branches: int = 0


def check(
    request: Request,
    prompt: list[int],
    manifest: Manifest,
    has_draft_model: bool = False,
    bad_words: Sequence[Sequence[int]] = (),
) -> Prepared:
    """Refuse what the bundle, and a draft model if one was loaded, cannot do; the decision never depends on K.

    Args:
        bad_words: those of the request as ids.

    Raises:
        RequestError: names the option, its value and the limit.
    """
    vocab_size = manifest.model.vocab_size
    if request.max_new_tokens < 0:
        raise RequestError(f"max_new_tokens is {request.max_new_tokens}, expected at least 0.")
    _require_stops(request.stops)
    _require_bad_words(bad_words)
    room = _room(prompt, manifest)
    drafter = choose_drafter(request.drafter, manifest.model, has_draft_model)
    ngram = choose_ngram(request.ngram_min, request.ngram_max, drafter)
    draft_tokens = _draft_tokens(request, drafter, manifest)
    return Prepared(
        prompt,
        drafter if draft_tokens else "none",
        draft_tokens,
        ngram,
        min(room, request.max_new_tokens),
        decoding_of(request, bad_words, vocab_size),
        frozenset() if request.ignore_eos else manifest.eos_token_ids,
        _verify_mode(request),
        _confidence(request, drafter, manifest),
        choose_branches(request, drafter, draft_tokens, manifest),
    )


def decoding_of(request: Request, bad_words: Sequence[Sequence[int]], vocab_size: int) -> Decoding:
    """How the tokens of a request are chosen.

    Raises:
        RequestError: a value is out of range, or two options contradict each other; names them.
    """
    named = {name: getattr(request, name) for name in _OPTIONS}
    options = SamplingOptions(**named, logit_bias=request.logit_bias or {}, bad_words=bad_words)
    options.require_vocabulary(vocab_size)
    rule = rule_of(request.acceptor, {name: getattr(request, name) for names in LOSSY.values() for name in names})
    if request.n < 1:
        raise RequestError(f"n is {request.n}, expected 1 or more.")
    if request.n > 1 and options.is_greedy:
        raise RequestError(
            f"n is {request.n}, but the temperature is 0, which gives the same answer every time; use n 1, or a "
            "temperature above 0."
        )
    if options.min_new_tokens > request.max_new_tokens:
        raise RequestError(
            f"min_new_tokens is {options.min_new_tokens}, more than max_new_tokens, which is {request.max_new_tokens}. "
            "Correct one of them."
        )
    if options.min_new_tokens and request.ignore_eos:
        raise RequestError(
            "min_new_tokens masks end tokens, but with ignore_eos they do not end the answer; leave one of the two out."
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(request, name)
        if count is not None and not 0 <= count <= vocab_size:
            raise RequestError(f"{name} is {count}, expected 0 to {vocab_size}, the size of the vocabulary.")
    return Decoding(options, rule, request.n, request.logprobs, request.prompt_logprobs)


def _require_stops(stops: Sequence[str]) -> None:
    """Every token of an answer is looked at for each of them, in the thread that all answers share."""
    if len(stops) > MOST_STOPS:
        raise RequestError(f"stop has {len(stops)} texts, expected at most {MOST_STOPS}; leave some out.")
    if any(not stop for stop in stops):
        raise RequestError("stop has an empty text, which would end every generation at once; leave it out.")
    if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
        raise RequestError(f"stop has a text of {longest} characters, expected at most {LONGEST_STOP}; shorten it.")


def _require_bad_words(words: Sequence[Sequence[int]]) -> None:
    """As for stops: each row of logits is masked for each of them."""
    if len(words) > MOST_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} sequences of ids (a text makes up to two), expected at most {MOST_BAD_WORDS}; "
            "leave some out."
        )
    if (longest := max(map(len, words), default=0)) > LONGEST_BAD_WORD:
        raise RequestError(
            f"bad_words has a sequence of {longest} ids, expected at most {LONGEST_BAD_WORD}; shorten it."
        )


def _room(prompt: list[int], manifest: Manifest) -> int:
    """Tokens that fit behind the prompt."""
    limits, vocab_size = manifest.limits, manifest.model.vocab_size
    if not prompt:
        raise RequestError("the prompt has no tokens; give at least one.")
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            f"the prompt has the token id {outside[0]}, the model knows 0 to {vocab_size - 1}. Use this bundle's "
            "tokenizer."
        )
    room = limits.max_model_len - len(prompt)
    if room < 1:
        longer = limits.max_model_len < manifest.model.max_position
        remedy = ", or build the bundle with a larger --max-model-len" if longer else ""
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, and prompt and answer together may have {limits.max_model_len}. "
            f"Shorten the prompt{remedy}."
        )
    return room


def _verify_mode(request: Request) -> VerifyMode:
    """How drafts are verified; the costs that `auto` goes by are those of `rows`."""
    if request.verify == "step" and request.draft_tokens == AUTO:
        raise RequestError(
            "verify is 'step', but draft_tokens is 'auto', which would choose 0 in every cycle, since a run for each "
            "row gains nothing; give a number, or use verify 'rows'."
        )
    return request.verify


def _confidence(request: Request, drafter: str, manifest: Manifest) -> float:
    """Where drafts end early."""
    asked = request.draft_confidence
    if asked is None:
        return 0.0
    if not 0 <= asked <= 1:
        raise RequestError(f"draft_confidence is {asked}, expected 0 to 1; 0 never ends a draft.")
    base, head = base_of(drafter), manifest.model.mtp
    if asked and base in ("none", "ngram"):
        raise RequestError(
            f"draft_confidence is {asked}, but the drafter is {drafter!r}, which has no probabilities; leave it out, "
            "or draft with a head or a draft model."
        )
    if asked and base != "draft-model" and head is not None and head.has_table:
        raise RequestError(
            f"draft_confidence is {asked}, but this bundle's head looks its ids up in a table, so that its logits stay "
            "inside; leave it out, or use draft_tokens 'auto'."
        )
    return asked


def _draft_tokens(request: Request, drafter: str, manifest: Manifest) -> DraftTokens:
    asked, limit = request.draft_tokens, manifest.limits.max_draft_tokens
    wanted = DEFAULT_DRAFT_TOKENS if asked is None else asked
    if wanted == AUTO:
        # Where nothing can be drafted, the best K is 0.
        return AUTO if limit and drafter != "none" else 0
    if request.drafter == "none" and asked:
        raise RequestError(f"drafter is 'none', but draft_tokens is {wanted}; use 0, or another drafter.")
    if drafter == "none":
        if asked:
            raise RequestError(
                f"draft_tokens is {wanted}, but this bundle was built without an MTP head; use 0, the drafter "
                "'ngram', or a draft model."
            )
        return 0
    if asked is None:
        return min(wanted, limit)
    if not 0 <= wanted <= limit:
        raise RequestError(
            f"draft_tokens is {wanted}, this bundle was built for 0 to {limit}. Choose within, or build it again with "
            "--draft-tokens."
        )
    return wanted
