"""Reading a parked session: what is lost is computed again, what is only out of reach stays as it was stored."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from tenure.errors import ConfigError, SaveError
from tenure.serve.errors import ApiError

if TYPE_CHECKING:
    from tenure.serve.held import Held
    from tenure.serve.parking import Parking
    from tenure.session import Session

_log = logging.getLogger("tenure.serve")


def read_parked(parking: Parking, held: Held) -> Session | None:
    """A parked session as it was stored; None where that is missing or broken.

    Raises:
        ApiError: 409, another model made it, and it is marked so; 503, there is no memory, or the folder cannot be
            read now.
    """
    try:
        return parking.load(held)
    except SaveError as error:
        if _ran_out(error):
            raise no_room(error) from error
        _log.warning("a parked session cannot be read: %s", error)
        return None
    except ConfigError as error:
        if error.option == "budget":
            raise no_room(error) from error
        held.foreign = True
        raise ApiError(
            409,
            "session_incompatible",
            f"the session {error.cause}. {error.way_out}, or delete the session",
            param="session_id",
        ) from error
    except Exception as error:
        _log.error("a parked session cannot be read now: %s", error)
        raise ApiError(
            503, "not_restored", "the session cannot be read now; it stays stored", retry_after=10
        ) from error


def no_room(error: ConfigError | SaveError) -> ApiError:
    """What a client hears where a session's slab does not fit the memory."""
    text = str(error) if isinstance(error, ConfigError) else "there is no memory left for the session now"
    return ApiError(503, "out_of_memory", text, retry_after=10)


def _ran_out(error: SaveError) -> bool:
    """Whether memory ran out: on a CPU torch has no error of its own for that."""
    cause = error.__cause__
    return isinstance(cause, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(cause)
