"""A byte-level BPE vocabulary, trained on the training documents only."""

from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from mtp_tools.train_tiny.corpus import Document
from mtp_tools.train_tiny.layout import END_OF_TEXT_ID, SPECIAL_TOKENS, VOCAB_SIZE

# The Qwen2 splitting rule: words with one leading space, single digits, punctuation, line ends.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(documents: Iterable[Document]) -> Tokenizer:
    """Train a tokenizer of exactly VOCAB_SIZE entries; the special tokens are ids 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE())
    # transformers' Qwen3.5 tokenizer class adds this one, whatever the file says.
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is large enough for the vocabulary"
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: Iterable[Document]) -> Tensor:
    """Return int64[tokens]: every document after one end-of-text token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    return torch.tensor(ids, dtype=torch.int64)
