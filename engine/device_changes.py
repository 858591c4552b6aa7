"""What a schedule gathers for the device besides its rows. No jax."""

import dataclasses

from headrace.engine.request import Request
from headrace.engine.schedule import PageCopy, PageMove


@dataclasses.dataclass
class DeviceChanges:
    """What the next step has to tell the device besides its rows.

    Attributes:
      released: slots to be ended, as numbered before this step's moves.
      copies, saves, loads: within the pool, to and from the host pool, in this order.
      resumed: requests whose row comes back with its pages.
      grown: requests that decode, with a page each has got.
    """

    released: list[int] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    saves: list[PageMove] = dataclasses.field(default_factory=list)
    loads: list[PageMove] = dataclasses.field(default_factory=list)
    resumed: list[Request] = dataclasses.field(default_factory=list)
    grown: list[tuple[Request, int]] = dataclasses.field(default_factory=list)
