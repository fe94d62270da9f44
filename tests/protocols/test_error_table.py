"""Every error in the words of OpenAI and of Anthropic, as an answer and in a stream."""

from __future__ import annotations

import json

import pytest

from singletree import errors
from singletree.errors import SingletreeError
from singletree.protocols import messages
from singletree.protocols.openai.answers import ChunkStream, encode_error
from singletree.protocols.responses.output import failure
from test_errors_pickled import EXAMPLES

BAD = "invalid_request_error"
FAILED = (500, "server_error", "server_error", "server_error", 500, "api_error")
TABLE: dict[type[SingletreeError], tuple[int, str, str | None, str, int, str]] = {
    errors.InvalidRequest: (400, BAD, None, "invalid_prompt", 400, BAD),
    errors.PreviousResponseNotFound: (400, BAD, "previous_response_not_found", "invalid_prompt", 400, BAD),
    errors.ThreadUnsupported: (400, BAD, None, "invalid_prompt", 400, BAD),
    errors.ContextOverflow: (400, BAD, "context_length_exceeded", "context_length_exceeded", 400, BAD),
    errors.BudgetSpent: (
        400,
        "insufficient_quota",
        "insufficient_quota",
        "insufficient_quota",
        402,
        "billing_error",
    ),
    errors.Unauthorized: (401, BAD, "invalid_api_key", "invalid_prompt", 401, "authentication_error"),
    errors.NotPermitted: (403, BAD, "insufficient_permissions", "invalid_prompt", 403, "permission_error"),
    errors.ForbiddenOrigin: (403, BAD, "origin_not_allowed", "invalid_prompt", 403, "permission_error"),
    errors.ForbiddenHost: (403, BAD, "host_not_allowed", "invalid_prompt", 403, "permission_error"),
    errors.ForbiddenAddress: (403, BAD, "address_not_allowed", "invalid_prompt", 403, "permission_error"),
    errors.ModelNotFound: (404, BAD, "model_not_found", "invalid_prompt", 404, "not_found_error"),
    errors.RouteNotFound: (404, BAD, "unknown_url", "invalid_prompt", 404, "not_found_error"),
    errors.NotStored: (404, BAD, None, "invalid_prompt", 404, "not_found_error"),
    errors.MethodNotAllowed: (405, BAD, "method_not_supported", "invalid_prompt", 405, BAD),
    errors.RequestTimeout: (408, BAD, "request_timeout", "invalid_prompt", 408, "timeout_error"),
    # Anthropic's schema of errors has no conflict_error, of which its page on errors writes.
    errors.Superseded: (409, BAD, None, "invalid_prompt", 409, BAD),
    errors.BodyTooLarge: (413, BAD, "request_too_large", "invalid_prompt", 413, "request_too_large"),
    errors.UnsupportedEncoding: (415, BAD, "unsupported_content_encoding", "invalid_prompt", 415, BAD),
    errors.RateLimited: (
        429,
        "requests",
        "rate_limit_exceeded",
        "rate_limit_exceeded",
        429,
        "rate_limit_error",
    ),
    errors.Overloaded: (503, "server_error", "overloaded", "rate_limit_exceeded", 529, "overloaded_error"),
    errors.EngineFailed: FAILED,
    errors.EngineUnfit: FAILED,
    errors.EngineUnreachable: FAILED,
    errors.WeightsUnavailable: FAILED,
    errors.BadConfiguration: FAILED,
    errors.BadFamily: FAILED,
}
"""Status, type and code of OpenAI's, its code in a failed response; status and type of Anthropic's."""


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_each_error_has_the_words_of_the_services(error: SingletreeError) -> None:
    openai_status, openai_type, code, failed_code, status, type_ = TABLE[type(error)]
    answered, answer = encode_error(error)
    shown = json.loads(answer)["error"]
    assert (answered, shown["type"], shown["code"]) == (openai_status, openai_type, code)
    (_, chunk), (_, done) = ChunkStream().fail(error)
    assert json.loads(chunk)["error"] == shown, "a stream has the same words"
    assert done == b"[DONE]"
    assert failure(error)["code"] == failed_code
    answered, answer = messages.encode_error(error)
    assert (answered, json.loads(answer)["error"]["type"]) == (status, type_)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_only_what_the_client_did_wrong_is_called_an_invalid_request(error: SingletreeError) -> None:
    at_fault = isinstance(error, errors.Rejected)
    assert at_fault or BAD not in TABLE[type(error)]
    assert BAD not in TABLE[type(error)] or error.status not in (402, 429, *range(500, 600))
