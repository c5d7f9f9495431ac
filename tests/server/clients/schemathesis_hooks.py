"""Bounds what a generated request costs: a few tokens say as much of an answer's form as a thousand."""

import schemathesis

MAX_TOKENS = 2
NUM_IDS = 256
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}


@schemathesis.hook
def before_call(context, case, kwargs):
    body, name = case.body, LIMITS.get(case.path)
    if case.path == "/detokenize" and isinstance(body, dict) and isinstance(body.get("tokens"), list):
        # The description cannot say how many ids the model has; those that are wrong stay so.
        body["tokens"] = [one % NUM_IDS if type(one) is int and 0 <= one < 2**31 else one for one in body["tokens"]]
    if name is None or not isinstance(body, dict):
        return
    limit = body.get(name)
    is_absent = limit is None and case.path != "/v1/messages"
    # Limits that are wrong stay so.
    if is_absent or (type(limit) is int and MAX_TOKENS < limit < 2**31):
        body[name] = MAX_TOKENS
    longer = body.get("max_completion_tokens")
    if type(longer) is int and MAX_TOKENS < longer < 2**31:
        body["max_completion_tokens"] = MAX_TOKENS
    if body.get("max_completion_tokens") == MAX_TOKENS:  # they are one limit
        body["max_tokens"] = MAX_TOKENS
