"""Proves on your model that company, order, cache, preemption, drafts change no bit.

    python -m headrace.scripts.verify_exactness invariance
    python -m headrace.scripts.verify_exactness invariance --model=FOLDER
    python -m headrace.scripts.verify_exactness speculation --draft=prompt-lookup
    python -m headrace.scripts.verify_exactness speculation --draft=self:int4 \
        --acceptance=rejection --numerics=fast

Runs random requests alone, then in company, in shuffled order, arriving while others
run, and with the prefix cache warm, in an engine whose pool is too small for all of
them, so that some are preempted. Token ids and the bits of every log-probability are
compared. Exits with 1 on a difference, and also when a condition never came about: no
cache hit, no preemption, no second chunk, no second decode bucket, no neighbour with
other sampling parameters, no completions that share a prefill. "speculation" compares
an engine with drafts and one without; it also fails where no draft was accepted. With
--acceptance=rejection it compares distributions, by chi-square.
"""

import dataclasses
import json
import sys
from typing import Any

import numpy as np
from absl import app, flags

from headrace.configs.schema import EngineConfig
from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import engine_flags, rejection_trial
from headrace.scripts import speculation_trial as trial
from headrace.scripts.speculation_trial import Result, result_of

FLAGS = flags.FLAGS

flags.DEFINE_integer("num_requests", 24, "Requests of each run.", lower_bound=8)
flags.DEFINE_integer(
    "draws", 400, "Of each prompt, where rejection is tried.", lower_bound=50
)
flags.DEFINE_integer("trial_seed", 0, "Seed of prompts, parameters and orders.")

SHARED_PAGES, MAX_OUTPUT = 2, 48
# For preempted requests, where --host_kv_bytes says nothing.
HOST_KV_BYTES = 2**31


@dataclasses.dataclass
class Conditions:
    """What came about in the runs, and has to, for the proof to say anything."""

    cache_hit_tokens: int = 0
    preemptions: int = 0
    prompts_of_several_chunks: int = 0
    decode_buckets: set[int] = dataclasses.field(default_factory=set)
    sample_variants_together: int = 0
    forks: int = 0

    def missing(self, num_buckets: int) -> list[str]:
        """Conditions that never came about."""
        met = {
            "a cache hit": self.cache_hit_tokens > 0,
            "a preemption": self.preemptions > 0,
            "a prompt of several chunks": self.prompts_of_several_chunks > 0,
            # An engine with one decode bucket has no second.
            "a second decode bucket": len(self.decode_buckets) >= min(2, num_buckets),
            "a neighbour with other parameters": self.sample_variants_together > 0,
            "a shared prefill": self.forks > 0,
        }
        return [name for name, is_met in met.items() if not is_met]


class Verifier:
    """Runs the same requests in several ways on one engine.

    Args:
      llm: with a pool too small for all requests, and host memory.
      count: requests.
      seed: of everything random.
    """

    def __init__(self, llm: Any, count: int, seed: int) -> None:
        self._llm, self._loop = llm, llm._loop
        self._rng = np.random.default_rng(seed)
        self.conditions = Conditions()
        self._watch_dispatch()
        config = llm.engine_config
        chunk = max(tokens for _, tokens in config.prefill_shapes)
        longest = min(chunk + chunk // 2, config.max_context_len - MAX_OUTPUT - 1)
        shared = self._ids(min(SHARED_PAGES * config.page_size, longest // 2))
        self._prompts = []
        for i in range(count):
            # Two short ones for each long one, so that many run together.
            most = longest - len(shared) if i % 3 == 0 else 2 * config.page_size
            own = int(self._rng.integers(1, most))
            self._prompts.append((shared if i % 2 else []) + self._ids(own))
        self._prompts[0] = self._ids(longest)
        self._params = [self._one_params(i) for i in range(count)]

    def run_all(self) -> dict[str, list[Result]]:
        """Every way of running, by name; "alone" is what the others must equal."""
        count = len(self._prompts)
        order = list(range(count))
        results = {"alone": [self._wave([i], cache=False)[i] for i in order]}
        results["alone, cache warm"] = [
            self._wave([i], cache=True)[i] for i in (*order, *order)
        ][count:]
        for name, cache, every in (
            ("in company", False, 0),
            ("in company, cache warm", True, 0),
            ("arriving while others run", True, 3),
        ):
            results[name] = self._listed(self._wave(order, cache=cache, every=every))
        for name in ("shuffled", "shuffled again"):
            mixed = self._rng.permutation(count).tolist()
            results[name] = self._listed(self._wave(mixed, cache=True))
        stats = self._llm.stats()["counters"]
        self.conditions.cache_hit_tokens = int(stats["prefix_cache_hits"])
        self.conditions.preemptions = int(stats["num_preemptions"])
        return results

    def _wave(
        self, order: list[int], *, cache: bool, every: int = 0
    ) -> dict[int, Result]:
        """Runs requests together; `every` turns a further one arrives (0: at once)."""
        states, waiting, turns = {}, list(order), 0
        while waiting or any(not s.is_finished for s in states.values()):
            while waiting and (not every or turns % every == 0):
                i = waiting.pop(0)
                states[i] = self._loop.submit(
                    self._prompts[i], self._params[i], uses_cache=cache
                )
                if every:
                    break
            self._loop.turn()
            turns += 1
        self._loop.drop(*states.values())
        return {i: result_of(state.output()) for i, state in states.items()}

    def _listed(self, results: dict[int, Result]) -> list[Result]:
        return [results[i] for i in range(len(results))]

    def _ids(self, count: int) -> list[int]:
        vocab = self._llm.model_config.vocab_size
        return self._rng.integers(0, vocab, count).tolist()

    def _one_params(self, index: int) -> SamplingParams:
        rng = self._rng
        # Every fourth has penalties, every eighth a second completion.
        penalty = 1.0 if index % 4 == 3 else 0.0
        return SamplingParams(
            n=2 if index % 8 == 7 and index % 3 else 1,
            presence_penalty=penalty,
            repetition_penalty=1.0 + penalty / 4,
            temperature=[0.0, 0.7, 1.0][index % 3],
            top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1.0, 0.9])),
            seed=int(rng.integers(0, 2**62)),
            max_tokens=int(rng.integers(MAX_OUTPUT // 2, MAX_OUTPUT + 1)),
            ignore_eos=True,
            logprobs=min(5, self._llm.engine_config.max_logprobs),
            detokenize=False,
        )

    def _watch_dispatch(self) -> None:
        """Notes which buckets run, which prompts are cut, and who decodes together."""
        scheduler, seen = self._loop._scheduler, self.conditions
        schedule, sizes = scheduler.schedule, self._llm.engine_config.decode_batch_sizes

        def watched() -> Any:
            step = schedule()
            if step is not None:
                seen.prompts_of_several_chunks += sum(
                    not chunk.is_last for chunk in step.prefill
                )
                seen.forks += len(step.forks)
                temperatures = {r.params.temperature for r in step.decode}
                seen.sample_variants_together += len(temperatures) > 1
                if step.decode:
                    rows = step.num_rows
                    seen.decode_buckets.add(next(b for b in sizes if b >= rows))
            return step

        scheduler.schedule = watched


def _small(engine: EngineConfig) -> EngineConfig:
    """The config with small sizes where they are left open."""
    return dataclasses.replace(
        engine,
        num_slots=engine.num_slots or 16,
        prefill_shapes=engine.prefill_shapes or ((1, 64), (1, 256)),
        max_context_len=engine.max_context_len or 512,
    )


def tight(engine: EngineConfig, count: int) -> EngineConfig:
    """The config with a pool for a third of the requests, and host memory for all.

    Sizes that are left open become small: the run should take minutes.
    """
    engine = _small(engine)
    assert engine.max_context_len is not None
    # Never below one request of the whole context, which the engine would refuse.
    pages = -(-engine.max_context_len // engine.page_size)
    wanted = engine.host_kv_bytes
    return dataclasses.replace(
        engine,
        num_pages=pages * max(1, count // 8) + 1,
        host_kv_bytes=HOST_KV_BYTES if wanted is None else wanted,
    )


def report(results: dict[str, list[Result]], conditions: Conditions) -> int:
    """Prints the table; returns the number of requests that differ anywhere."""
    alone, total = results["alone"], 0
    print(
        f"{'way of running':<28}{'requests':>9}{'tokens':>8} differ{'bits':>6} differ"
    )
    for name, found in results.items():
        pairs = list(zip(alone, found, strict=True))
        tokens = sum(a[0] != b[0] for a, b in pairs)
        bits = sum(a[1] != b[1] for a, b in pairs)
        total += tokens + bits
        print(f"{name:<28}{len(found):>9}{tokens:>15}{bits:>13}")
    facts = dataclasses.asdict(conditions)
    facts["decode_buckets"] = sorted(conditions.decode_buckets)
    print(json.dumps(facts | {"differences": total}))
    return total


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 only where nothing differs and all was tried."""
    return engine_flags.exit_code(lambda: verify(argv[1:]))


def verify_speculation() -> int:
    """Builds both engines, one after the other, and compares; the exit code.

    Raises:
      ValueError: no --draft.
    """
    if FLAGS.draft is None:
        raise ValueError("'speculation' needs --draft, such as prompt-lookup")
    rejects = FLAGS.acceptance == "rejection"
    found: list[Any] = []
    for proposer in (None, FLAGS.draft):

        def change(engine: EngineConfig, draft: str | None = proposer) -> EngineConfig:
            # What is tried are the drafts, so they are on in every step unless asked.
            adapts = bool(FLAGS.adapts_drafts)
            engine = _small(engine)
            return dataclasses.replace(engine, draft=draft, adapts_drafts=adapts)

        llm = engine_flags.build_llm(change)
        if rejects:
            found.append(rejection_trial.draw(llm, FLAGS.draws, FLAGS.trial_seed))
        else:
            asked = trial.trial_requests(
                llm.model_config.vocab_size,
                min(128, llm.engine_config.max_context_len),
                FLAGS.num_requests,
                FLAGS.trial_seed,
            )
            found.append(trial.run_requests(llm, asked))
        stats = llm.stats()["speculation"]
        llm.close()
    if rejects:
        return rejection_trial.report(*found, stats, FLAGS.trial_seed)
    return trial.compare(*found, stats)


def verify(words: list[str]) -> int:
    """Builds the engine, runs everything; the exit code.

    Raises:
      ValueError: the words say neither "invariance" nor "speculation".
    """
    if words == ["speculation"]:
        return verify_speculation()
    if words != ["invariance"]:
        raise ValueError(
            f"say what to verify: 'invariance' or 'speculation', got {words}"
        )
    llm = engine_flags.build_llm(lambda engine: tight(engine, FLAGS.num_requests))
    verifier = Verifier(llm, FLAGS.num_requests, FLAGS.trial_seed)
    differences = report(verifier.run_all(), verifier.conditions)
    missing = verifier.conditions.missing(len(llm.engine_config.decode_batch_sizes))
    for name in missing:
        print(f"error: {name} never came about: nothing is shown", file=sys.stderr)
    return 1 if differences or missing else 0


if __name__ == "__main__":
    app.run(main)
