"""Every error a user of Tenure can meet.

An error names the option or the thing at fault, says why, and says what to do instead. The command line prints
it without a traceback and exits with 2; the library leaves the session as it was before the call.
"""

from __future__ import annotations


class TenureError(Exception):
    """Base of all errors raised on purpose.

    Args:
        cause: what is wrong, with the numbers.
        option: the option, argument or file position at fault.
        way_out: what the user can do instead.
    """

    def __init__(self, cause: str, *, option: str | None = None, way_out: str | None = None) -> None:
        self.cause = cause
        self.option = option
        self.way_out = way_out
        text = f"{option}: {cause}" if option else cause
        super().__init__(f"{text}. {way_out}" if way_out else text)


class ConfigError(TenureError, ValueError):
    """An option has a value that cannot work."""


class BudgetError(TenureError):
    """What must stay resident does not fit the budget. Raised before anything changes."""


class ModelError(TenureError):
    """A model cannot be found, fetched, read or does not fit memory."""


class UnsupportedModelError(ModelError):
    """The model has a part that Tenure cannot reproduce exactly."""


class DownloadError(ModelError):
    """A model file could not be fetched. Whatever arrived is kept and the next try resumes."""


class MessageError(TenureError, ValueError):
    """A chat message is malformed or refused by the model's template. ``index`` is its place in the list."""

    def __init__(
        self, cause: str, *, index: int | None = None, option: str | None = None, way_out: str | None = None
    ) -> None:
        self.index = index
        if option is None and index is not None:
            option = f"message {index}"
        super().__init__(cause, option=option, way_out=way_out)


class SessionFileError(TenureError, ValueError):
    """A session file has a broken line. ``line`` counts from 1."""

    def __init__(self, cause: str, *, path: str, line: int | None = None, way_out: str | None = None) -> None:
        self.path = path
        self.line = line
        super().__init__(cause, option=path if line is None else f"{path}:{line}", way_out=way_out)


class SaveError(TenureError, ValueError):
    """A session could not be saved, or what is to be restored is missing, broken or of another kind."""


class PlanError(TenureError, ValueError):
    """A plan names unknown spans or steps, or contradicts itself."""


class UnknownSpanError(TenureError, KeyError):
    """A span id is not part of the session."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class IntegrityError(TenureError):
    """An invariant of the cache or the ledger does not hold: a bug in Tenure, never bad input."""


class TierError(TenureError):
    """A store of evicted spans gave no answer, or a wrong one. Costs a session a miss, never its life."""
