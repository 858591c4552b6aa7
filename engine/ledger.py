"""The compile ledger: every program of an engine, known before it serves.

One entry per compiled shape: where it came from, what it cost, what memory it takes,
which bit class the probe put it in, and whether the engine uses it.
"""

import dataclasses
from typing import Any

from headrace.engine.draft_control import PassCosts


@dataclasses.dataclass(kw_only=True)
class LedgerEntry:
    """One program.

    Attributes:
      name: such as "decode[8]", "prefill[1x128]", "sample[greedy, 8]".
      role: "generating", "filling" or "sampling".
      source: "compiled" here, or "stored" by an earlier start.
      seconds: lowering and compiling, or loading.
      temp_bytes: temporary device memory of one call.
      alias_bytes: bytes of donated arguments that the results reuse.
      bit_class: programs with the same letter give the same bits, where they can be
        compared: filling and generating with each other, sampling with itself.
      used: False where the engine keeps away from it, to stay in one class.
    """

    name: str
    role: str
    source: str
    seconds: float
    temp_bytes: int
    alias_bytes: int
    bit_class: str = "-"
    used: bool = True


@dataclasses.dataclass(kw_only=True)
class Ledger:
    """All entries of one engine, and the verdict of the bit-class probe.

    Attributes:
      entries: by name.
      verdict: in words.
      caches_output: pages that decoding filled may serve as other requests' prefix.
      pass_costs: of decode steps with and without drafts, by bucket.
    """

    entries: dict[str, LedgerEntry] = dataclasses.field(default_factory=dict)
    verdict: dict[str, str] = dataclasses.field(default_factory=dict)
    caches_output: bool = False
    pass_costs: dict[int, PassCosts] = dataclasses.field(default_factory=dict)

    def add(self, entry: LedgerEntry) -> None:
        """Adds one program."""
        self.entries[entry.name] = entry

    def facts_to_store(self, stored: dict[str, Any]) -> dict[str, Any]:
        """What the next start need not find out again, with what was stored before.

        Starts with and without host memory share programs, so each adds its own.
        """
        entries = self.entries.values()
        classes = {e.name: e.bit_class for e in entries if e.role != "moving"}
        memory = stored.get("memory", {}) | self.memory_facts()
        costs = [[b, dataclasses.asdict(c)] for b, c in self.pass_costs.items()]
        return {"memory": memory, "classes": classes, "costs": costs}

    def memory_facts(self) -> dict[str, list[int]]:
        """Temporary and aliased bytes per program, to be stored with them."""
        entries = self.entries.values()
        return {e.name: [e.temp_bytes, e.alias_bytes] for e in entries}

    def table(self) -> str:
        """The ledger as text: a line per program, then the verdict per role."""
        lines = [
            f"{'program':<24}{'role':<12}{'source':<10}{'s':>6}{'temp MB':>9}"
            f"{'alias MB':>10}  class"
        ]
        for entry in self.entries.values():
            lines.append(
                f"{entry.name:<24}{entry.role:<12}{entry.source:<10}"
                f"{entry.seconds:>6.2f}{entry.temp_bytes / 1e6:>9.1f}"
                f"{entry.alias_bytes / 1e6:>10.1f}  {entry.bit_class}"
                f"{'' if entry.used else ' (unused)'}"
            )
        lines += [f"{role}: {text}" for role, text in self.verdict.items()]
        return "\n".join(lines)
