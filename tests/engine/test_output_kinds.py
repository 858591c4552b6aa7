"""What a stream yields, and how an ended request says why."""

import pytest

from headrace import SamplingParams

OPTIONS = dict(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)


def _stream(llm, **params):
    return list(llm.stream([4, 5, 6], SamplingParams(**OPTIONS | params)))


@pytest.mark.parametrize("n", [1, 3])
def test_each_kind_tells_the_same_story(text_llm, n):
    more = dict(n=n, seed=3, temperature=0.9 if n > 1 else 0)
    deltas = _stream(text_llm, **more)
    wholes = _stream(text_llm, output_kind="cumulative", **more)
    finals = _stream(text_llm, output_kind="final_only", **more)
    (truth,) = text_llm.generate(
        [[4, 5, 6]], SamplingParams(**OPTIONS | more), use_tqdm=False
    )
    assert len(finals) == 1 and finals[0].finished
    assert finals[0].outputs == truth.outputs
    for index in range(n):
        told = [o for d in deltas for o in d.outputs if o.index == index]
        seen = [o for w in wholes for o in w.outputs if o.index == index]
        lengths = [len(o.token_ids) for o in seen]
        assert lengths == sorted(lengths) and len(lengths) > 3
        assert all(o.token_ids == truth.outputs[index].token_ids[:m]
                   for o, m in zip(seen, lengths, strict=True))  # fmt: skip
        assert seen[-1] == truth.outputs[index]
        assert "".join(o.text for o in told) == seen[-1].text
        assert [i for o in told for i in o.token_ids] == seen[-1].token_ids
    assert [d.finished for d in wholes[:-1]] == [False] * (len(wholes) - 1)


def test_kind_must_be_one_that_there_is():
    with pytest.raises(ValueError, match=r"output_kind must be in .*got all"):
        SamplingParams(output_kind="all")


def test_reasons_have_a_message_where_one_helps(engine_of):
    engine = engine_of(num_slots=1, decode_batch_sizes=(1,))
    first, waits = engine.request("a", 5, 40), engine.request("b", 5, 9)
    waits.queue_deadline_s, first.deadline_s = 3.0, 6.0
    engine.add(first, waits)
    engine.run()
    ended = {r.request_id: (r.finish_reason, r.finish_message) for r in (first, waits)}
    assert ended["b"] == ("rejected", "it waited longer than its queue_timeout_s")
    assert ended["a"] == ("deadline", "its deadline_s is over")
