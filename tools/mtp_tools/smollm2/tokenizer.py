"""tokenizer.json from the tokens, merges and token types of a GGUF file, and the check that it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mtp_tools.smollm2.layout import require, special_ids
from mtp_tools.smollm2.wheel import ModelError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types of GGUF that a byte-level vocabulary uses."""
SPLITTING = "smollm"
"""GGUF names the splitting rule instead of storing it: digits one by one, then GPT-2's."""
TEXTS = (
    "The quick brown fox jumps over the lazy dog, twice.",
    "def area(w, h):\n\treturn w*h  # 1234.5\n\n\nprint(area(2, 3))\r\n",
    "  leading,   inner and trailing blanks   ",
    "Grüße aus Köln, naïve café, Ελληνικά, русский, 日本語, العربية, 🙂🚀",
    "it's we'll I'd they've 10,000.00 x_1 -> y[0] != z;",
)


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer with the ids of the GGUF file.

    Raises:
        ModelError: another kind of vocabulary, another splitting rule, or merges that lead nowhere.
    """
    kind, rule = require(metadata, "tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rule != SPLITTING:
        raise ModelError(
            f"The GGUF file has a tokenizer of the kind {kind!r} with the rule {rule!r}, expected 'gpt2' and "
            f"{SPLITTING!r}; use another file."
        )
    tokens, types = require(metadata, "tokenizer.ggml.tokens"), require(metadata, "tokenizer.ggml.token_type")
    merges = [_pair(merge) for merge in require(metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # The library raises bare Exception for every kind of bad table.
        raise ModelError(f"The GGUF file's merges do not fit its tokens: {error}; fetch it again.") from error
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
        elif type_ != NORMAL:
            raise ModelError(f"The GGUF file's token {token!r} has the type {type_}, expected 1, 3 or 4; use another.")
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, metadata: Mapping[str, Any], texts: Sequence[str] = TEXTS) -> str:
    """Compare with the GGUF file token by token and encode texts back and forth; says what was found.

    Besides `texts`, the text of every normal token that is whole characters must survive.

    Raises:
        ModelError: names the first token or text that does not come out as it went in.
    """
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    special = 0
    for number, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        whole = type_ != NORMAL
        special += whole
        alone = tokenizer.encode(token).ids == [number] if whole else set(token) <= alphabet
        hidden = (tokenizer.decode([number]) == "") == (type_ == CONTROL)
        if tokenizer.id_to_token(number) != token or not alone or not hidden:
            raise ModelError(f"The tokenizer treats token {number}, {token!r}, unlike type {type_}; report this.")
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError(f"The tokenizer has {tokenizer.get_vocab_size()} tokens, the GGUF file {len(tokens)}; report.")
    words = tokenizer.decode_batch([[number] for number, type_ in enumerate(types) if type_ == NORMAL])
    survivors = [*texts, *(word for word in words if "\ufffd" not in word)]
    for text, encoded in zip(survivors, tokenizer.encode_batch(survivors), strict=True):
        back = tokenizer.decode(encoded.ids, skip_special_tokens=False)
        if back != text:
            raise ModelError(f"The tokenizer turns {text[:60]!r} into {back[:60]!r}; report this.")
    return (
        f"{len(tokens)} tokens ({special} special) agree with their types, {len(survivors)} texts come back as they "
        f"were; {len(alphabet - set(tokens))} of 256 bytes have no token and are dropped"
    )


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template of the file."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        # The class that takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": require(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": require(metadata, "tokenizer.chat_template"),
        **{name.removesuffix("_id"): tokens[number] for name, number in special_ids(metadata, "unk").items()},
    }


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
