"""What quantizing a checkpoint cost: kept beside it, told whenever it is loaded.

`scripts/quality_report.py` measures it. The file is no part of the checkpoint: it names
the one that it is of, and is passed over for another.
"""

import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from headrace.checkpoints.cache_dir import atomic_write
from headrace.checkpoints.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# Beside what a folder holds; a file's report bears the file's name.
FILE = "quality.json"
_SHOWN = ("perplexity_increase", "top1_agreement", "num_tokens", "kl_mean")


def quality_path(checkpoint_path: pathlib.Path) -> pathlib.Path:
    """Where the report of a checkpoint lies."""
    if checkpoint_path.is_dir():
        return checkpoint_path / FILE
    return checkpoint_path.with_name(f"{checkpoint_path.name}.{FILE}")


def save_quality(
    checkpoint_path: pathlib.Path, checkpoint: Checkpoint, facts: Mapping[str, Any]
) -> None:
    """Keeps a line of the quality report beside the checkpoint that it is of."""
    content = {"identity": checkpoint.identity, **facts}
    with atomic_write(quality_path(checkpoint_path)) as file:
        file.write(json.dumps(content, indent=2).encode())


def load_quality(
    checkpoint_path: pathlib.Path, identity: str
) -> Mapping[str, Any] | None:
    """The report of a checkpoint, None where there is none of it.

    Args:
      checkpoint_path: file or folder.
      identity: of the checkpoint.
    """
    path = quality_path(checkpoint_path)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is no quality report: %s", path, error)
        return None
    if not isinstance(facts, dict) or facts.get("identity") != identity:
        logger.warning("%s is the report of another checkpoint", path)
        return None
    return facts


def quality_line(checkpoint: Checkpoint) -> str:
    """One line for people: what is known of a quantized checkpoint's quality."""
    name, facts = checkpoint.quantization, checkpoint.quality or {}
    try:
        increase, agreement, count, kl = (facts[key] for key in _SHOWN)
        return (
            f"{facts.get('scheme', name)}: perplexity {increase:+.2%}, likeliest "
            f"token the same at {agreement:.1%}, mean KL {kl:.4f} nat, over {count} "
            f"tokens"
        )
    except (KeyError, TypeError, ValueError):
        return f"{name}: no quality report; scripts/quality_report.py makes one"
