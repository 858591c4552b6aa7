"""Rules of text that a tokenizer cannot keep are refused, request by request."""

import pytest
import tokenizers

from headrace import SamplingParams
from headrace.engine.text_rules import TextRules


def test_spaces_between_special_tokens_are_refused_where_they_cannot_be_left_out(
    text_llm, tiny_config
):
    params = SamplingParams(spaces_between_special_tokens=False, max_tokens=1)
    assert text_llm.generate([5], params, use_tqdm=False)[0].finished

    class Spaced:
        eos_token = "</s>"

        def encode(self, text, *, add_bos):
            return [0]

        def decode(self, ids, *, skip_special_tokens):
            return " ".join("</s>" for _ in ids)

    with pytest.raises(ValueError, match="must be True with this tokenizer"):
        TextRules(Spaced(), *tiny_config).resolve(params)


def test_a_tokenizer_that_grammars_cannot_read_is_one_request_that_cannot_run(
    tiny_config,
):
    class Gaps:
        eos_token = "b"

        def to_json(self):
            reads.append(1)
            words = {"a": 0, "b": 7}
            model = tokenizers.models.WordLevel(words, unk_token="a")
            return tokenizers.Tokenizer(model).to_str()

    rules, reads = TextRules(Gaps(), *tiny_config), []
    for _ in range(2):
        with pytest.raises(ValueError, match="structured outputs"):
            rules.resolve(SamplingParams(structured_outputs={"json_object": True}))
    assert len(reads) == 1  # a tokenizer takes a while to read
    assert rules.resolve(SamplingParams()).grammar is None
