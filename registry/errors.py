"""Every error modelkin raises on purpose.

    ModelkinError
    ├── BadInput            what was given cannot be used
    │   ├── Unparseable     a file is not in the format it should be in
    │   └── Unsupported     well-formed, but not something modelkin does
    ├── NotFound            no such thing in the registry
    ├── Ambiguous           several things fit; the message lists them
    ├── Conflict            it contradicts what is stored
    │   └── Busy            somebody else holds it; try again later
    ├── SpaceMismatch       two points of different spaces were to be compared
    ├── Refused             the model will not be registered or scored, and why
    ├── Corrupt             what is stored does not match its checksum
    └── Unavailable         something outside modelkin does not answer
        ├── DatabaseUnavailable
        ├── HubUnavailable  rate limit, server error or no network: worth another try
        └── NoSpace         a disk is full

Each class knows its HTTP status and slug (RFC 9457) and the exit code of the command line.  A message says what was
wrong and where; `hint` says what to do.
"""

from __future__ import annotations


class ModelkinError(Exception):
    """Root of the tree; never raised itself."""

    status = 500
    slug = "internal"
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInput(ModelkinError):
    status, slug, exit_code = 422, "bad-input", 2


class Unparseable(BadInput):
    slug = "unparseable"


class Unsupported(BadInput):
    slug = "unsupported"


class NotFound(ModelkinError):
    status, slug, exit_code = 404, "not-found", 3


class Ambiguous(ModelkinError):
    status, slug, exit_code = 409, "ambiguous", 4


class Conflict(ModelkinError):
    status, slug, exit_code = 409, "conflict", 4


class Busy(Conflict):
    status, slug = 423, "busy"


class SpaceMismatch(ModelkinError):
    status, slug, exit_code = 409, "space-mismatch", 5


class Refused(ModelkinError):
    """A model that will not be registered or scored.

    `reason` is a stable slug for programs.  What it is: encoder_only, encoder_decoder, vision_only, vision_language,
    unsupported_architecture, unsupported_format, gguf_only, no_weights, pickle_only, remote_code, missing_backend.
    What is wrong with it: missing_shards, bad_weights, bad_tokenizer, no_template, bad_template, unloadable, changed,
    adapter_without_base.  What its Hub says: gated, not_found_or_private, disabled, revision_gone, unauthorised.
    """

    status, slug, exit_code = 422, "refused", 6

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class Corrupt(ModelkinError):
    """Damage of the disk or the database; never a matter of what was asked."""

    slug = "corrupt"


class Unavailable(ModelkinError):
    status, slug, exit_code = 503, "unavailable", 7


class DatabaseUnavailable(Unavailable):
    slug = "database-unavailable"


class HubUnavailable(Unavailable):
    slug = "hub-unavailable"

    def __init__(self, message: str, *, hint: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class NoSpace(Unavailable):
    status, slug = 507, "no-space"
