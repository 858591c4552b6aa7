"""The compile gate's table: facts of compiled programs, for people."""

from collections.abc import Mapping
from typing import Any

from headrace.scripts.gpu_compile import PtxasKernel


def table(programs: Mapping[str, Mapping[str, Any]], ptxas: list[PtxasKernel]) -> str:
    """Facts for people.

    Args:
      programs: name -> its facts, as `check_gpu_compile.Gate` notes them.
      ptxas: every kernel that ptxas printed registers of.
    """
    lines = [
        f"{'program':<20}{'s':>6}{'args':>9}{'temp':>8}{'alias':>8}{'kernels':>8}"
        f"{'a layer':>8}{'read':>9}{'floor':>9}{'KV':>8}{'moved':>9}{'model us':>9}"
        f"{'floor':>8}"
    ]
    for name, facts in programs.items():
        mega = {k: v / 1e6 for k, v in facts.items() if k.endswith("_bytes") and v}
        moved = facts["moved_bytes"]
        lines.append(
            f"{name:<20}{facts['seconds']:>6.1f}{mega['argument_bytes']:>9.1f}"
            f"{mega.get('temp_bytes', 0):>8.1f}{mega.get('alias_bytes', 0):>8.1f}"
            f"{facts['kernels']:>8}{facts['kernels_per_layer'] or '-':>8}"
            f"{mega['read_bytes']:>9.1f}{mega['floor_bytes']:>9.1f}"
            f"{mega.get('kv_bytes', 0):>8.1f}{_mega(moved):>9}"
            f"{facts['model_us'] or '-':>9}{facts['model_floor_us']:>8.1f}"
        )
    for name, facts in programs.items():
        if facts["kernels_per_layer"]:
            lines.append(
                f"{name}: attention by {facts['attention']}; weights pass "
                f"{facts['weight_passes']} times at most{_over_floor(facts)}"
            )
        for kernel, count in facts["mosaic"].items():
            lines.append(f"{name}: {count} calls of {kernel}")
    for seen in dict.fromkeys(ptxas):
        lines.append(
            f"{seen.name}: {seen.registers} registers, {seen.spill_bytes} bytes "
            f"spilled, {seen.stack_bytes} of stack"
        )
    return "\n".join(lines)


def _over_floor(facts: Mapping[str, Any]) -> str:
    if facts["moved_bytes"] is None:
        return ""
    floor = facts["floor_bytes"] + facts["kv_bytes"]
    read, moved = (facts[name] / floor for name in ("all_read_bytes", "moved_bytes"))
    return f"; over the floor: read {read:.3f}, moved {moved:.3f}"


def _mega(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"
