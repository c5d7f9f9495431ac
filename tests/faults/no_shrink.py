"""A pytest plugin: Hypothesis tries the same examples in every run, and one that fails is not made smaller."""

from hypothesis import Phase, settings

settings.register_profile("faults", phases=(Phase.explicit, Phase.generate), derandomize=True)
settings.load_profile("faults")
