"""What drafts bring: seconds and target passes with and without, in turns.

    python -m headrace.scripts.bench_speculation --draft=prompt-lookup
    python -m headrace.scripts.bench_speculation --num_slots=1 --numerics=fast
    python -m headrace.scripts.bench_speculation --draft=self:int4 --noadapts_drafts

Two engines over the same weights, one without drafts, run the same greedy requests in
turns, so that a busy machine slows both alike. "copy" are prompts whose end has begun
to repeat their start; "offline" is the workload of that name. The figures are medians
over the rounds; the ratio is that of seconds without drafts to seconds with them.
Outputs are compared, too: a difference fails, but for --acceptance=rejection.
"""

import dataclasses
import json
import statistics
import sys
from typing import Any

from absl import app, flags

from headrace.configs.schema import EngineConfig
from headrace.scripts import engine_flags
from headrace.scripts.bench_throughput import (
    Workload,
    fold_ids,
    load_workload,
    run_workload,
    warm_up,
)

FLAGS = flags.FLAGS

flags.DEFINE_integer("num_rounds", 3, "Runs of each engine.", lower_bound=1)
flags.DEFINE_integer(
    "num_copies", 16, "Requests of each workload and round.", lower_bound=1
)

_NUM_SLOTS, _CONTEXT = 8, 512
# Of a prompt's tokens this many are said again before the model goes on.
_BEGUN = 12


def workloads(vocab_size: int, count: int, room: int) -> list[Workload]:
    """The two workloads.

    Args:
      vocab_size: of the model; ids beyond it are folded.
      count: requests of each.
      room: longest prompt and output together.
    """
    offline = fold_ids(load_workload("offline", count), vocab_size)
    starts = [ids[: room // 3] for ids in offline.prompts]
    copies = [ids + ids[:_BEGUN] for ids in starts]
    return [
        Workload(
            name="copy",
            prompts=copies,
            max_tokens=[max(8, len(ids) - 2 * _BEGUN) for ids in copies],
        ),
        dataclasses.replace(
            offline,
            prompts=[ids[: room // 2] for ids in offline.prompts],
            max_tokens=[min(n, room // 2) for n in offline.max_tokens],
        ),
    ]


def few_programs(engine: EngineConfig) -> EngineConfig:
    """One decode bucket and two prefill shapes."""
    slots = FLAGS.num_slots or _NUM_SLOTS
    return dataclasses.replace(
        engine,
        num_slots=slots,
        decode_batch_sizes=(slots,),
        prefill_shapes=((1, 64), (1, 256)),
        max_context_len=engine.max_context_len or _CONTEXT,
        draft=engine.draft or "prompt-lookup",
        prefix_cache=False,
    )


def run(llm: Any, workload: Workload) -> tuple[float, list[list[int]]]:
    """Seconds, and all tokens."""
    found = run_workload(llm, workload)
    return found.monitor.wall_s, [o.outputs[0].token_ids for o in found.outputs]


def compare(plain: Any, drafts: Any, workload: Workload, rounds: int) -> dict[str, Any]:
    """One line of the table: both engines in turns, first one and then the other.

    Args:
      plain: the engine without drafts.
      drafts: the other.
      workload: what both run.
      rounds: of each.
    """
    before, seconds, same = drafts.stats()["speculation"], [], True
    for index in range(rounds):
        order = (plain, drafts) if index % 2 == 0 else (drafts, plain)
        found = {id(llm): run(llm, workload) for llm in order}
        (plain_s, wanted), (drafts_s, tokens) = found[id(plain)], found[id(drafts)]
        seconds.append((plain_s, drafts_s))
        same &= wanted == tokens
    after = drafts.stats()["speculation"]

    def gained(name: str) -> int:
        return after[name] - before[name]

    passes = gained("passes")
    tokens_out = sum(workload.max_tokens)
    return {
        "workload": workload.name,
        "requests": len(workload.prompts),
        "tokens": tokens_out,
        "plain_s": round(statistics.median(a for a, _ in seconds), 2),
        "drafts_s": round(statistics.median(b for _, b in seconds), 2),
        "ratio": round(statistics.median(a / b for a, b in seconds), 3),
        # The first token of each request comes from its prefill.
        "passes": passes // rounds,
        "tokens_per_pass": round(
            (tokens_out - len(workload.prompts)) * rounds / max(1, passes), 2
        ),
        "accepted": round(
            gained("num_accepted_tokens") / max(1, gained("num_draft_tokens")), 3
        ),
        "drafted_steps": round(gained("drafted_steps") / max(1, gained("steps")), 3),
        "same_tokens": same,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """The lines for people."""
    rows = [{name: name for name in lines[0]}, *lines]
    return "\n".join(
        "  ".join(f"{value!s:>{max(8, len(name))}}" for name, value in row.items())
        for row in rows
    )


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where something was refused or differs."""
    return engine_flags.exit_code(lambda: bench(argv[1:]))


def bench(words: list[str]) -> int:
    """Builds both engines and runs everything.

    Raises:
      ValueError: unknown arguments, or a setting out of its range.
    """
    if words:
        raise ValueError(f"unknown arguments {words}")
    drafts = engine_flags.build_llm(few_programs)
    plain = engine_flags.build_llm(
        lambda engine: dataclasses.replace(few_programs(engine), draft=None)
    )
    config = drafts.engine_config
    lines = []
    for llm in (plain, drafts):
        warm_up(llm)
    for workload in workloads(
        drafts.model_config.vocab_size, FLAGS.num_copies, config.max_context_len
    ):
        lines.append(compare(plain, drafts, workload, FLAGS.num_rounds))
    costs = drafts.ledger.pass_costs[config.num_slots]
    facts = {
        "draft": config.draft,
        "num_drafts": config.num_drafts,
        "num_slots": config.num_slots,
        "numerics": config.numerics,
        "acceptance": config.acceptance,
        "adapts_drafts": config.adapts_drafts,
        "step_ms": {
            name: round(value * 1e3, 2)
            for name, value in dataclasses.asdict(costs).items()
        },
    }
    print(table(lines))
    print(json.dumps(facts | {"workloads": lines}))
    is_exact = config.acceptance == "exact"
    if is_exact and not all(line["same_tokens"] for line in lines):
        print("error: drafts have changed tokens", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
