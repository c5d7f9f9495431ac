"""Programs here run for less time than they take to compile."""

from tests.compilation import quick_compilation  # noqa: F401
