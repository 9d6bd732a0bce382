"""The files of a release: what they hold, and the wheel as a user has it. `make release` tries the others, too."""

import pytest

from tests.repo import release

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.covers("release")]
pytest.importorskip("build", reason="`make test` installs it")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return release.build(tmp_path_factory.mktemp("dist"))


def test_every_file_holds_what_it_needs_and_nothing_else(built, monkeypatch):
    release.check_contents(built)
    monkeypatch.setattr(release, "FILES", ("LICENSE", "Makefile"))
    with pytest.raises(SystemExit, match=r"it lacks \['Makefile'\], and it should not have \['README.md', 'pyproject.toml'"):
        release.check_contents(built)


def test_the_wheel_works_outside_of_the_checkout_without_a_compiler(built, tmp_path):
    """It is installed with its dependencies, runs an example alone and on 4 processes, and has types for pyright."""
    release.check([built.wheel], tmp_path)
