"""What the tests of structured outputs share: a small tokenizer, and walks by masks."""

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.engine.grammar_tokens import GrammarTokens

BOS, EOS, VOCAB_SIZE = 261, 262, 300  # the tokenizer ends at 263
NUM_WORDS = 10
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": -5, "maximum": 120},
        "kind": {"enum": ["fast", 'é\n"', 3, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "in": {
            "type": "object",
            "properties": {"x": {"const": "y"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def byte_level():
    """One token per byte, five longer ones, two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["fo", "foo", '{"', '",', "ĠĠ"]
    vocab = {text: i for i, text in enumerate([*alphabet, *pairs])}
    merges = [("f", "o"), ("fo", "o"), ("{", '"'), ('"', ","), ("Ġ", "Ġ")]
    fast = tokenizers.Tokenizer(models.BPE(vocab, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    return fast


FAST = byte_level()
TOKENS = GrammarTokens(FAST.to_str(), VOCAB_SIZE, [EOS])


def allowed(state, num_words=NUM_WORDS, **stops):
    """The ids of the mask."""
    mask_W = np.full(num_words, 0x55, np.int32)
    state.fill_mask(mask_W, **stops)
    bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def push(state, text, fast=FAST):
    for token_id in fast.encode(text).ids:
        state.advance(token_id)
    return state


def walk(state, rng, num_words=NUM_WORDS, stop_id=EOS, most=600):
    """Random allowed tokens until the stop id is drawn, or is all there is."""
    ids = []
    for _ in range(most):
        found = allowed(state, num_words, stop_ids=[stop_id])
        if stop_id in found and (len(found) == 1 or rng.random() < 0.2):
            assert state.is_complete
            return ids
        found.discard(stop_id)
        ids.append(int(rng.choice(sorted(found))))
        state.advance(ids[-1])
    raise AssertionError(f"no end within {most} tokens: {ids}")
