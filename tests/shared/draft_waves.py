"""Requests of all kinds that come and go, for engines with and without drafts."""

import numpy as np

from headrace import SamplingParams

KINDS = [
    dict(temperature=0.0),
    dict(temperature=0.3),
    dict(temperature=0.0, logprobs=3),
    dict(temperature=0.8, top_k=20, top_p=0.9),
    dict(temperature=0.0, repetition_penalty=1.1, logprobs=2),
    dict(temperature=0.5, frequency_penalty=0.2, presence_penalty=0.1),
    dict(temperature=0.0, min_tokens=9, stop_token_ids=list(range(100, 107))),
    dict(temperature=0.2, min_p=0.2, logit_bias={7: 2.5}),
    dict(temperature=0.0, bad_words=["ab", "zzz"]),
    dict(temperature=0.4, n=2, logprobs=1),
    dict(temperature=0.0, allowed_token_ids=[5, 6, 7, 8], logprobs=1),
]


class Whim:
    """Stands in for the control: drafts always, or at random."""

    def __init__(self, *, always):
        self._always, self._rng = always, np.random.default_rng(5)
        self.choices = {True: 0, False: 0}

    def wants_drafts(self, schedule):
        wants = bool(schedule.decode) and (self._always or self._rng.random() < 0.5)
        self.choices[wants] += bool(schedule.decode)
        return wants

    def on_step(self, schedule, result, did_draft):
        assert did_draft or not schedule.decode or result.num_tokens.max() <= 1

    def snapshot(self):
        return {}


def bits(output):
    """All that a request's user sees."""
    return [
        (
            one.token_ids,
            one.text,
            one.finish_reason,
            one.stop_reason,
            one.logprobs
            and [[(i, e.logprob, e.rank) for i, e in s.items()] for s in one.logprobs],
        )
        for one in output.outputs
    ]


def requests(count, seed):
    """Prompts that repeat themselves, in part those of others, and parameters."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 250, 40).tolist()
    asked = []
    for index in range(count):
        part = rng.integers(1, 250, int(rng.integers(1, 12))).tolist()
        prompt = (shared if index % 3 == 0 else []) + part * int(rng.integers(1, 6))
        params = SamplingParams(
            **KINDS[index % len(KINDS)],
            seed=int(rng.integers(0, 2**60)),
            max_tokens=int(rng.integers(1, 90)),
            ignore_eos=bool(index % 2),
        )
        asked.append((prompt, params))
    return asked


def in_waves(llm, asked, seed):
    """Requests that come at random turns, among others that leave early."""
    loop, rng = llm._loop, np.random.default_rng(seed)
    waiting, states, rude = list(enumerate(asked)), {}, []
    while waiting or any(not state.is_finished for state in states.values()):
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                index, (prompt, params) = waiting.pop(0)
                rules = loop.text_rules.resolve(params)
                states[index] = loop.submit(prompt, params, rules=rules)
        if rng.random() < 0.2:
            rude.append(loop.submit([3, 4] * 20, SamplingParams(max_tokens=80)))
        if rude and rng.random() < 0.2:
            loop.drop(rude.pop(0))
        loop.turn()
    loop.drop(*rude, *states.values())
    while loop.has_work:
        loop.turn()
    return [bits(states[index].output()) for index in range(len(asked))]
