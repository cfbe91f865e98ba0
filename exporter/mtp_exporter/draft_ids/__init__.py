"""A draft head over a part of the vocabulary: which ids, from which text, and what it saves."""
