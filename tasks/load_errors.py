"""Whatever transformers, torch or a model's own code raise while loading, as one of modelkin's refusals."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from registry.errors import ModelkinError, Refused


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except pickle.UnpicklingError as error:
        raise Refused("bad_weights", f"{name}: its pickle asks for more than numbers", hint="do not use it") from error
    except SafetensorError as error:
        raise Refused("bad_weights", f"{name}: a broken weight file: {error}", hint="get it again") from error
    except FileNotFoundError as error:
        raise Refused("missing_shards", f"{name}: {first_line(error)}", hint="get the files again") from error
    except ImportError as error:
        raise Refused("missing_backend", f"{name}: {first_line(error)}", hint="install that package") from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise Refused(
                "remote_code", f"{name} runs its own code", hint="register it with --trust-remote-code"
            ) from error
        raise Refused("bad_weights", f"{name}: {first_line(error)}", hint="transformers cannot load it") from error
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError" or "memory" in str(error):
            raise
        # Sizes that do not match, and pickles that would run code.
        raise Refused("bad_weights", f"{name}: {first_line(error)}", hint="the files do not fit the config") from error
    except (ModelkinError, MemoryError):
        raise
    except Exception as error:  # configs and remote code are strangers' work: anything can come out of them
        raise Refused(
            "unloadable",
            f"{name}: transformers cannot load it: {first_line(error)}",
            hint="check config.json and the files beside it, or get them again",
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
