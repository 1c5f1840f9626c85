"""Every error that may reach a user, as one small tree with stable codes.

::

    TokenpathError
    ├── InvalidRequestError          400  invalid_request
    │   ├── ContextLengthError       400  context_length_exceeded
    │   ├── UnsupportedError         400  unsupported_parameter
    │   ├── MethodNotAllowedError    405  method_not_allowed    (Allow)
    │   ├── ConflictError            409  conflict
    │   ├── SlowBodyError            408  request_timeout
    │   └── BodyTooLargeError        413  body_too_large
    ├── AuthenticationError          401  invalid_api_key
    ├── PermissionDeniedError        403  permission_denied
    ├── NotFoundError                404  not_found
    │   └── ModelNotFoundError       404  model_not_found
    ├── OverloadedError              429  overloaded            (Retry-After)
    ├── DeadlineError                504  deadline_exceeded
    ├── UnavailableError             503  unavailable           (Retry-After)
    │   ├── NotReadyError            503  not_ready
    │   ├── AsleepError              503  asleep
    │   ├── DrainingError            503  draining
    │   └── ReplicaLostError         503  replica_lost
    ├── CancelledError               499  cancelled
    ├── EngineError                  500  engine_error
    ├── SpecError                     -   invalid_spec          (exit code 2)
    └── ModelError                    -   model_error           (exit code 3)
        ├── ModelFileError            -   model_file_invalid
        ├── ModelUnsupportedError     -   model_unsupported
        └── PullError                 -   pull_failed

A client may depend on ``code``; the sentence may change. Lower libraries' exceptions are mapped to
one of these once, where the library is called. The last branches happen on the operator's
terminal; if one of them ever reaches HTTP it is a 500 without detail.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it crosses the replica link."""

    code: str
    """One of the stable codes of the tree above."""
    message: str
    """One sentence for the client; never a stack trace, never prompt text."""
    param: str | None = None
    """The request field at fault, in the API's own spelling."""


class TokenpathError(Exception):
    """Root of the tree. Raise a leaf, not this."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    """OpenAI's ``error.type``."""
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed if sent again unchanged."""
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """The part that crosses the replica link."""
        return ErrorInfo(code=self.code, message=self.message, param=self.param)


class InvalidRequestError(TokenpathError):
    """The request itself is wrong; sending it again will not help."""

    code = "invalid_request"
    http_status = 400
    kind = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output exceed what the model, or its KV pool, can hold."""

    code = "context_length_exceeded"


class UnsupportedError(InvalidRequestError):
    """A field that this server knows but does not implement for this model."""

    code = "unsupported_parameter"


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, but not for this HTTP method."""

    code = "method_not_allowed"
    http_status = 405


class ConflictError(InvalidRequestError):
    """What was asked for does not go with the state that something is in."""

    code = "conflict"
    http_status = 409


class SlowBodyError(InvalidRequestError):
    """The request body did not arrive in the time a client has for it."""

    code = "request_timeout"
    http_status = 408
    retryable = True


class BodyTooLargeError(InvalidRequestError):
    """The request body exceeds the spec's limit in bytes."""

    code = "body_too_large"
    http_status = 413


class AuthenticationError(TokenpathError):
    """No key, an unknown key or a revoked one; which of these is never said."""

    code = "invalid_api_key"
    http_status = 401
    kind = "authentication_error"


class PermissionDeniedError(TokenpathError):
    """The caller is known but may not do this."""

    code = "permission_denied"
    http_status = 403
    kind = "permission_error"


class NotFoundError(TokenpathError):
    """No such path or object."""

    code = "not_found"
    http_status = 404
    kind = "invalid_request_error"


class ModelNotFoundError(NotFoundError):
    """The named model is not served here."""

    code = "model_not_found"


class OverloadedError(TokenpathError):
    """A bounded queue or a limit is full; the client should come back later."""

    code = "overloaded"
    http_status = 429
    kind = "rate_limit_error"
    retryable = True


class DeadlineError(TokenpathError):
    """The request ran past the seconds it was allowed."""

    code = "deadline_exceeded"
    http_status = 504
    kind = "timeout_error"


class UnavailableError(TokenpathError):
    """The server, or the replica needed, cannot answer now."""

    code = "unavailable"
    http_status = 503
    kind = "server_error"
    retryable = True


class NotReadyError(UnavailableError):
    """The model is still loading."""

    code = "not_ready"


class AsleepError(UnavailableError):
    """The model sleeps: by the spec it is woken on purpose only, or waking it has failed."""

    code = "asleep"


class DrainingError(UnavailableError):
    """The server is shutting down and takes no new work."""

    code = "draining"


class ReplicaLostError(UnavailableError):
    """The engine process ended while it was working on the request."""

    code = "replica_lost"


class CancelledError(TokenpathError):
    """The client went away; nobody is left to read this."""

    code = "cancelled"
    http_status = 499
    kind = "invalid_request_error"


class EngineError(TokenpathError):
    """An unexpected failure while handling this one request; details are in the server's log."""

    code = "engine_error"


class SpecError(TokenpathError):
    """The spec, a flag or the machine's set-up is wrong."""

    code = "invalid_spec"
    exit_code = 2


class ModelError(TokenpathError):
    """A model cannot be had or used."""

    code = "model_error"
    exit_code = 3


class ModelFileError(ModelError):
    """A model's file is truncated, corrupt or contradicts its own metadata."""

    code = "model_file_invalid"


class ModelUnsupportedError(ModelError):
    """The model is sound, but of an architecture or type that the engine does not know."""

    code = "model_unsupported"


class PullError(ModelError):
    """A download failed or did not match its checksum."""

    code = "pull_failed"


def error_classes() -> dict[str, type[TokenpathError]]:
    """Every class of the tree by its code."""
    found: dict[str, type[TokenpathError]] = {}
    pending: list[type[TokenpathError]] = [TokenpathError]
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found


def from_info(info: ErrorInfo) -> TokenpathError:
    """Rebuild the typed error on the other side of the link.

    A code that this version does not know becomes an ``EngineError``.
    """
    cls = error_classes().get(info.code, EngineError)
    return cls(info.message, param=info.param)
