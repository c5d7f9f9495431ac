"""The error of a request that cannot be served as it stands."""


class RequestError(ValueError):
    """A request is wrong, too large or not supported. `parameter` is the place in its body, such as
    `messages[0].content`; `code` is OpenAI's, for programs."""

    def __init__(self, message: str, parameter: str | None = None, code: str | None = None):
        super().__init__(message)
        self.parameter, self.code = parameter, code
