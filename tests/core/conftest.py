"""The tests of this folder need neither torch nor transformers.

What these packages say is stored in `tests/fixtures`, with the scripts that made it; they are
asked again in `tests/product`.
"""

import importlib.abc
import pathlib
import sys

import pytest

ABSENT = ("torch", "transformers")
HERE = pathlib.Path(__file__).parent


class Refusing(importlib.abc.MetaPathFinder):
    """An import of these packages fails, and names the cure."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in ABSENT:
            raise ModuleNotFoundError(
                f"tests/core runs without {fullname}: store what it says in tests/fixtures, "
                "and compare with it live in tests/product",
                name=fullname,
            )
        return None


def _alone(config: pytest.Config) -> bool:
    """Returns whether every test of this run is in this folder."""
    root = config.invocation_params.dir
    paths = [(root / argument.split("::")[0]).resolve() for argument in config.args]
    return all(path == HERE or HERE in path.parents for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if _alone(config):
        sys.meta_path.insert(0, Refusing())


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = [name for name in ABSENT if name in sys.modules]
    if found and _alone(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\ntests/core imported {' and '.join(found)}", file=sys.stderr)
