"""The rows of the capability table, in its order."""

from tests.conformance.things import running, saving, optimizing, models, data, callbacks, surroundings  # noqa: F401, I001
