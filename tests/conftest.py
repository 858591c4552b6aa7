"""Engines shared by the tests: one tiny one, one real one, one compile cache; and a
fake device that needs none of them."""

import dataclasses
import os
import zlib

import hypothesis
import jax
import numpy as np
import pytest
import tokenizers

from headrace import LLM
from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.configs import load_config, parse_config

# The same examples in every run, so that a red run can be repeated;
# HYPOTHESIS_PROFILE=explore draws new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def tiny_config():
    """(ModelConfig, EngineConfig) of the two-layer model."""
    return parse_config(load_config("tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_config):
    """Seeded random weights of the two-layer model."""
    return synthetic_checkpoint(tiny_config[0], seed=3)


@pytest.fixture(scope="session")
def tiny_llm(tiny_config, tiny_checkpoint):
    """An engine over the two-layer model: token ids in, token ids out."""
    config = dataclasses.replace(tiny_config[1], scoring=True, max_logprobs=-1)
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def byte_tokenizer():
    """id 0 ends a text, 1 to 256 are bytes, then four longer tokens."""
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("{", '"'), ('"', ":"), ("Ġ", "a")]
    texts = ["</s>", *bytes_, *(a + b for a, b in merges)]
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, merges)
    )
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    fast.add_special_tokens(["</s>"])
    return TokenizerSpec(tokenizer_json=fast.to_str(), eos_token="</s>")


@pytest.fixture(scope="session")
def text_llm(tiny_llm, tiny_checkpoint, byte_tokenizer):
    """The programs of `tiny_llm`, and a tokenizer: text in, text out."""
    checkpoint = dataclasses.replace(tiny_checkpoint, tokenizer=byte_tokenizer)
    llm = LLM.from_checkpoint(checkpoint, config=tiny_llm.engine_config)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def smollm_llm():
    """SmolLM2 with few buckets, for the tests that need real weights."""
    llm = LLM(
        "smollm2-135m-instruct",
        config={
            "max_context_len": 1024,
            "num_slots": 16,
            "decode_batch_sizes": (8, 16),
            "prefill_shapes": ((1, 64), (1, 256)),
            "scoring": True,
        },
    )
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def dense_logits():
    """(config, params, ids) -> [T, V]: the forward that all others are held against."""
    return _dense_logits


def _dense_logits(config, params, ids):
    """float64, one sequence, no cache, no pages, written from the equations."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    T, H, K, G = len(ids), config.head_dim, config.num_kv_heads, config.group_size
    half = H // 2
    angle = np.arange(T)[:, None] * config.rope_base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rope(x):  # [..., T, H]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = p["embedding"][np.array(ids)]
    for layer in range(config.num_layers):
        w = p[f"layer_{layer}"]
        h = norm(x, w["attention_norm"])
        qkv = np.einsum("kjhd,td->kjth", w["qkv"], h)
        q, k, v = rope(qkv[:, :G]), rope(qkv[:, G]), qkv[:, G + 1]
        score = np.einsum("kgth,ksh->kgts", q, k) / np.sqrt(H)
        score = np.where(np.tri(T, dtype=bool), score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        out = np.einsum("kgts,ksh->tkgh", weight, v).reshape(T, K * G * H)
        x = x + out @ w["out"].T
        h = norm(x, w["mlp_norm"])
        gate, up = h @ w["gate_up"][0].T, h @ w["gate_up"][1].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    head = p["embedding"] if config.tie_embeddings else p["head"]
    return norm(x, p["final_norm"]) @ head.T


PAGE_SIZE, VOCAB_SIZE = 16, 11


def next_token(history):
    """The fake model: any token depends on all before it."""
    return zlib.crc32(bytes(history)) % VOCAB_SIZE


@dataclasses.dataclass
class Row:
    """A slot's row, as the device keeps it."""

    pages: list[int]
    position: int  # of the last token
    remaining: int
    stop_ids: tuple[int, ...]
    last_token: int | None = None  # not yet in the pages
    is_active: bool = True


class FakeDevice:
    """Applies Schedules like the compiled steps do, with real pages and rows.

    Tokens follow from what the pages hold, so a wrong page, row or order shows.
    """

    def __init__(self, num_slots, num_pages, num_host_pages):
        self.rows = [None] * num_slots
        self.extra_rows = list(range(num_slots))
        self.pages = [[None] * PAGE_SIZE for _ in range(num_pages)]
        self.host = [None] * num_host_pages

    def step(self, schedule):
        """Runs one step; returns (token ids, finish codes) with junk elsewhere."""
        self._move_pages(schedule)
        if schedule.slot_sources is not None:
            assert sorted(schedule.slot_sources) == list(range(len(self.rows)))
            self.rows = [self.rows[source] for source in schedule.slot_sources]
            self.extra_rows = [self.extra_rows[s] for s in schedule.slot_sources]
        self._check_extras(schedule)
        for slot in schedule.released:
            if self.rows[slot] is not None:
                self.rows[slot].is_active = False
        for slot, page in schedule.new_pages:
            row = self.rows[slot]
            if row.is_active:
                assert row.position // PAGE_SIZE == len(row.pages)
            row.pages.append(page)
        for back in schedule.resumed:
            old = self.rows[back.slot]
            assert old is None or not old.is_active, "the slot has another request"
            self.rows[back.slot] = Row(
                pages=list(back.request.pages),
                position=back.position,
                remaining=back.remaining,
                stop_ids=back.request.stop_ids,
                last_token=back.last_token,
            )
        tokens = np.full(len(self.rows), -7, np.int32)
        finish = np.full(len(self.rows), 0, np.int32)
        if schedule.decode:
            for slot, row in enumerate(self.rows):
                if row is not None and row.is_active:
                    assert slot < schedule.num_rows
                    self._write(row.pages, row.position, row.last_token)
                    tokens[slot], finish[slot] = self._sample(row)
        leaders = [self._prefill(chunk) for chunk in schedule.prefill]
        # Before a leader's own token joins its history.
        forked = [(fork, self._fork(fork, leaders)) for fork in schedule.forks]
        for chunk, row in zip(schedule.prefill, leaders, strict=True):
            if row is not None:
                tokens[chunk.slot], finish[chunk.slot] = self._sample(row)
        for fork, row in forked:
            tokens[fork.slot], finish[fork.slot] = self._sample(row)
            row.pages = list(fork.request.pages)
        return tokens, finish

    def _check_extras(self, schedule):
        """Who samples first, or again, has its counts written, and to its own row."""
        begins = [*schedule.resumed, *schedule.forks]
        begins += [chunk for chunk in schedule.prefill if chunk.is_last]
        assert sorted(row for _, row in schedule.extras) == sorted(
            self.extra_rows[one.slot] for one in begins if one.request.params.has_extras
        )
        for request, row in schedule.extras:
            assert self.extra_rows[request.slot] == row

    def _fork(self, fork, leaders):
        """A row that has its leader's logits; later tokens come from its own pages."""
        old, leader = self.rows[fork.slot], leaders[fork.source]
        assert old is None or not old.is_active, "the slot has another request"
        row = dataclasses.replace(
            leader,
            pages=list(leader.pages),
            remaining=fork.request.max_tokens,
            stop_ids=fork.request.stop_ids,
        )
        self.rows[fork.slot] = row
        return row

    def _move_pages(self, schedule):
        for copy in schedule.copies:
            self.pages[copy.target] = list(self.pages[copy.source])
        for move in schedule.saves:
            for device, host in zip(move.device, move.host, strict=True):
                self.host[host] = list(self.pages[device])
        for move in schedule.loads:
            for device, host in zip(move.device, move.host, strict=True):
                self.pages[device] = list(self.host[host])

    def _prefill(self, chunk):
        request, end = chunk.request, chunk.start + chunk.length
        tokens = request.tokens(chunk.start, end)
        assert len(tokens) == chunk.length
        for position, token in enumerate(tokens, chunk.start):
            self._write(request.pages, position, token)
        if not chunk.is_last:
            return None
        if (old := self.rows[chunk.slot]) is not None:
            assert not old.is_active, "the slot has another request"
        row = Row(
            pages=list(request.pages),
            position=end - 1,
            remaining=request.max_tokens - (request.fill_len - request.prompt_len),
            stop_ids=request.stop_ids,
        )
        self.rows[chunk.slot] = row
        return row

    def _write(self, pages, position, token):
        self.pages[pages[position // PAGE_SIZE]][position % PAGE_SIZE] = token

    def _sample(self, row):
        history = [
            self.pages[row.pages[p // PAGE_SIZE]][p % PAGE_SIZE]
            for p in range(row.position + 1)
        ]
        row.last_token = next_token(history)
        row.position += 1
        row.remaining -= 1
        code = 1 if row.last_token in row.stop_ids else 2 * (row.remaining == 0)
        row.is_active = code == 0
        return row.last_token, code

    @staticmethod
    def tokens_alone(request):
        """What the fake model gives the request in an engine of its own."""
        history = list(request.prompt_token_ids)
        output = []
        while len(output) < request.max_tokens:
            output.append(next_token([*history, *output]))
            if output[-1] in request.stop_ids:
                break
        return output


@pytest.fixture(scope="session")
def fake_device():
    """The FakeDevice class: pages of 16 tokens, a vocabulary of 11."""
    return FakeDevice
