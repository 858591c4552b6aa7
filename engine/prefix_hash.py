"""Names for full pages of tokens: equal names mean equal keys and values.

A page's name is a cryptographic hash over the name of the page before it and its own
tokens, so it stands for the whole prefix. The chain starts from a seed that holds all
else that the pages depend on: the model, the bit class that wrote them, the adapter
and the tenant. No jax.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

PageName = bytes
_NAME_BYTES = 16  # a collision takes about 2**64 pages


def chain_seed(
    *, model: str, bit_class: str, adapter: str = "", tenant: str = ""
) -> PageName:
    """The name before the first page; different wherever one argument differs."""
    digest = hashlib.blake2b(digest_size=_NAME_BYTES, person=b"headrace-page")
    for part in (model, bit_class, adapter, tenant):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def name_pages(
    before: PageName, token_ids: Sequence[int], page_size: int
) -> tuple[PageName, ...]:
    """Names of the full pages of `token_ids`; a partly filled last page has none.

    Args:
      before: name of the page before the first, or the chain's seed.
      token_ids: whole pages from a page's start.
      page_size: tokens per page.
    """
    full = len(token_ids) // page_size
    data = np.array(token_ids[: full * page_size], np.int32).tobytes()
    names, step = [], 4 * page_size
    for start in range(0, len(data), step):
        digest = hashlib.blake2b(before, digest_size=_NAME_BYTES)
        digest.update(data[start : start + step])
        before = digest.digest()
        names.append(before)
    return tuple(names)
