"""The one exception tree.

ReefError
├── ConfigError          a setting is wrong: shown to the operator, exit status 2
├── BadRequest           the client sent something unusable (4xx in its own dialect)
│   ├── UnknownModel     404 under `server.models: strict`
│   ├── Unauthorized     401
│   ├── Forbidden        403
│   ├── BodyTooLarge     413
│   └── HeadersTooLarge  431
├── UpstreamError        the engine failed or refused; carries the status to pass on
├── StoreError           the log or the learn database can't be used
├── ModelError           a model or adapter folder is missing, broken or not the expected one
├── JudgeError           no valid verdict could be had now; the turn waits and is asked again
└── RecipeError          a recipe can't be found or breaks its contract

An error is raised where it is known and handled once, at a boundary: the gateway turns it into
error JSON, the command line into one line on stderr. It knows nothing of HTTP beyond a status.
"""

from __future__ import annotations


class ReefError(Exception):
    """Base of everything Reef raises on purpose."""


class ConfigError(ReefError):
    """A key or a value in serve.yaml, the environment or the command line is wrong."""


class BadRequest(ReefError):
    """The request can't be served as it is. `param` names the offending field, if one does."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(BadRequest):
    """The named model is not served (only under `server.models: strict`)."""

    status = 404
    code = "model_not_found"


class Unauthorized(BadRequest):
    """No key, or one that is not known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BadRequest):
    """The key is known but may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(BadRequest):
    """No such receipt, session or release."""

    status = 404
    code = "not_found"


class BodyTooLarge(BadRequest):
    """The request body exceeds `server.max_body_mb`."""

    status = 413
    code = "body_too_large"


class HeadersTooLarge(BadRequest):
    """The request headers exceed `server.max_header_kb`."""

    status = 431
    code = "headers_too_large"


class UpstreamError(ReefError):
    """The engine answered with an error or could not be reached.

    `status` is what the client is told; `body` is the engine's own error JSON, if it sent one;
    `retry_after` what it said about when to come back.
    """

    def __init__(
        self, message: str, *, status: int = 502, body: object | None = None, retry_after: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.retry_after = retry_after


class StoreError(ReefError):
    """A database is locked by another service, of another schema, or can't be written."""


class ModelError(ReefError):
    """A model or adapter folder is missing, incomplete or has the wrong content hash."""


class JudgeError(ReefError):
    """The judge gave no valid verdict. The turn stays queued; it never becomes neutral by this."""


class RecipeError(ReefError):
    """A recipe is not installed, or its samples or loss break the contract."""
