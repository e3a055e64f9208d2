"""Whatever the Hub, the network or the disk did to a request, as one of our own errors."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from registry.errors import HubUnavailable, NoSpace, Refused

OF_THIS_MACHINE = {errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ELOOP, errno.ENAMETOOLONG}
"""Faults of a disk or a limit here, which no other request to the Hub will cure."""

_XET = re.compile(r"CAS Client Error|reconstruction error|^Task error|\b[Xx]et\b")
"""hf_xet, which fetches most large files, raises a plain RuntimeError for whatever its storage or the disk did."""


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Says which refusal or failure it was.  GatedRepoError is a RepositoryNotFoundError, and a rate limit met while
    downloading comes as a FileNotFoundError: so the order of the questions matters."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise refusal("gated", where) from error
    except errors.DisabledRepoError as error:
        raise refusal("disabled", where) from error
    except errors.RepositoryNotFoundError as error:
        raise refusal("not_found_or_private", where) from error
    except errors.RevisionNotFoundError as error:
        raise refusal("revision_gone", where) from error
    except errors.HFValidationError as error:
        raise refusal("not_found_or_private", where) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise _other_failure(where, error) from error
    except RuntimeError as error:
        if not _XET.search(str(error)):
            raise
        raise _xet_failure(where, str(error)) from error
    except Exception as error:
        # A forced download turns whatever the Hub answered into a ValueError.
        if isinstance(error, ValueError) and isinstance(error.__cause__, (errors.HfHubHTTPError, OSError)):
            raise _other_failure(where, error.__cause__) from error
        # The HTTP library's own tree (timeouts, refused connections) is not huggingface_hub's.
        if not any(type(each).__module__.startswith("httpx") for each in (error, error.__cause__)):
            raise
        raise _unreachable(where, error.__cause__ or error) from error


def _other_failure(where: str, error: BaseException) -> Exception:
    from huggingface_hub import errors

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (errors.HfHubHTTPError, errors.OfflineModeIsEnabled)):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return _full(where)
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, errors.GatedRepoError):
        return refusal("gated", where)
    if isinstance(cause, errors.DisabledRepoError):
        return refusal("disabled", where)
    if isinstance(cause, errors.RepositoryNotFoundError):
        return refusal("not_found_or_private", where)
    if isinstance(cause, errors.RevisionNotFoundError):
        return refusal("revision_gone", where)
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        if status == 401:
            return refusal("unauthorised", where)
        if status == 403:
            return refusal("gated", where)
        if status == 429:
            return HubUnavailable(
                f"the Hub limits our requests (asked for {where})",
                hint="wait a little and run it again; a token (HF_TOKEN) raises the limit",
                retry_after_s=retry_after(cause.response.headers),
            )
        if status >= 500:
            return HubUnavailable(
                f"the Hub answers {status} for {where}",
                hint="wait a little and run it again",
                retry_after_s=retry_after(cause.response.headers),
            )
        return Refused("not_found_or_private", f"the Hub answers {status} for {where}", hint="check the name")
    if type(error).__module__.startswith("hf_xet"):
        # Its own errors pass for faults of a file: a refused token is a PermissionError.
        return _xet_failure(where, str(error) or type(error).__name__)
    if isinstance(error, (PermissionError, FileExistsError, NotADirectoryError)):
        return error
    if isinstance(error, OSError) and error.errno in OF_THIS_MACHINE:
        return error
    if "Consistency check failed" in str(error):
        return HubUnavailable(
            f"the Hub sent less or more of a file of {where} than it stated",
            hint="a proxy may have cut it: run it again",
        )
    return _unreachable(where, error)


def _xet_failure(where: str, said: str) -> Exception:
    if re.search(rf"os error ({errno.ENOSPC}|{errno.EDQUOT})\b|No space left", said):
        return _full(where)
    status = re.search(r"HTTP status \w+ error \((\d{3})", said)
    answers = f"answers {status[1]}" if status else f"cannot be reached: {said.splitlines()[0][:200]}"
    return HubUnavailable(
        f"the Hub's storage (Xet) {answers} for {where}",
        hint="wait a little and run it again; HF_HUB_DISABLE_XET=1 takes the plain way",
    )


def _full(where: str) -> NoSpace:
    return NoSpace(f"the disk filled while {where} was downloaded", hint="free some space and run it again")


def _unreachable(where: str, error: BaseException) -> HubUnavailable:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return HubUnavailable(
        f"the Hub cannot be reached for {where}: {reason}",
        hint="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, then run it again",
    )


def refusal(reason: str, where: str) -> Refused:
    said = {
        "gated": (
            f"{where} is gated and this token has no access",
            "accept its terms on its Hub page, then set HF_TOKEN (or `hf auth login`)",
        ),
        "disabled": (f"{where} was disabled by the Hub", "choose another model"),
        "not_found_or_private": (
            f"the Hub has no {where}, or it is private and this token may not see it",
            "check the spelling; for a private repo set HF_TOKEN; a local folder is written ./folder",
        ),
        "revision_gone": (f"the Hub has no such revision: {where}", "see the repo's branches, tags and commits"),
        "unauthorised": (f"the Hub does not accept the token for {where}", "check HF_TOKEN, or unset it"),
    }[reason]
    return Refused(reason, said[0], hint=said[1])


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait as the answer asks for: Retry-After in seconds or as a date, else the reset of a used-up limit.

    A date is read against the answer's own clock where it tells it: ours may be wrong.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    until, now = _date(value), _date(headers.get("Date", "")) or datetime.now(UTC)
    if until is not None:
        return max(0.0, (until - now).total_seconds())
    # As in the draft "RateLimit header fields for HTTP": "api";r=0;t=55
    reset = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("RateLimit", ""))
    return float(reset[1]) if reset else None


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def status_of(error: BaseException) -> int | None:
    """Of the Hub's answer that this error is about; None where nothing answered."""
    from huggingface_hub import errors

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, errors.HfHubHTTPError):
            return int(cause.response.status_code)
        cause = cause.__cause__ or cause.__context__
    return None
