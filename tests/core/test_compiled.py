"""Where a command keeps its compiled programs."""

import os
import pathlib
import stat

import jax
import pytest

import specjax
from specjax._internal import kept_programs
from specjax.options import compiled
from specjax.options.compiled import keep_compiled


def test_a_folder_of_the_users_cache(tmp_path):
    """It is the user's own, and JAX is told of it."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = keep_compiled(environ)
    assert folder is not None and folder.parent == tmp_path / "specjax" / "programs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert folder == keep_compiled({"XDG_CACHE_HOME": str(tmp_path)})


def test_another_processor_has_another_folder(tmp_path, monkeypatch):
    before = keep_compiled({"XDG_CACHE_HOME": str(tmp_path)})
    monkeypatch.setattr(compiled.platform, "machine", lambda: "another")
    assert keep_compiled({"XDG_CACHE_HOME": str(tmp_path)}) != before


@pytest.mark.parametrize("chosen", ["", "/somewhere"])
def test_a_users_setting_stands(tmp_path, chosen):
    environ = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": chosen}
    before = dict(environ)
    assert keep_compiled(environ) is None
    assert environ == before and not list(tmp_path.iterdir())


def test_without_a_place_to_write_nothing_is_kept(tmp_path):
    (tmp_path / "specjax").write_text("a file")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert keep_compiled(environ) is None
    assert "JAX_COMPILATION_CACHE_DIR" not in environ


@pytest.mark.parametrize("whose", ["specjax", "specjax/programs", "machine"])
def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch, whose):
    """Its owner could have this process run their code."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = keep_compiled(dict(environ))
    assert folder is not None
    theirs, found = folder if whose == "machine" else tmp_path / whose, pathlib.Path.stat
    other = list(found(theirs))
    other[stat.ST_UID] += 1

    def stat_of(self, **options):
        return os.stat_result(other) if self == theirs else found(self, **options)

    monkeypatch.setattr(pathlib.Path, "stat", stat_of)
    assert keep_compiled(environ) is None and "JAX_COMPILATION_CACHE_DIR" not in environ


def test_others_may_not_write(tmp_path):
    """Neither into the folder nor beside it, whatever the umask was when they were made."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = keep_compiled(dict(environ))
    assert folder is not None
    folders = folder, folder.parent, folder.parent.parent
    for one in folders:
        one.chmod(0o777)
    assert keep_compiled(environ) == folder
    assert {stat.S_IMODE(one.stat().st_mode) for one in folders} == {0o755}


def test_the_oldest_go(tmp_path, monkeypatch):
    """Down to three quarters of the limit, those of other versions too."""
    monkeypatch.setattr(compiled, "MOST_BYTES", 100)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = keep_compiled(dict(environ))
    other = folder.parent / "jaxlib-0"
    other.mkdir()
    files = [other / "a", folder / "b", folder / "c", folder / "d"]
    for age, file in enumerate(files):
        file.write_bytes(bytes(30))
        os.utime(file, (age, age))
    keep_compiled(dict(environ))
    assert [file.exists() for file in files] == [False, False, True, True]


@pytest.mark.parametrize("devices", [1, 2])
def test_no_program_over_several_processors_is_kept(tmp_path, monkeypatch, devices):
    """XLA:CPU may run collectives of a program from a cache in another order on each device."""
    kept = jax.config.jax_enable_compilation_cache
    monkeypatch.setattr(kept_programs, "_folder", tmp_path)
    monkeypatch.setattr(jax, "make_mesh", lambda *_, **__: None)  # as if there were two
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        specjax.make_mesh(devices=jax.devices()[:1] * devices)
        assert kept_programs.keeps() == (devices == 1)
        assert jax.config.jax_enable_compilation_cache == (devices == 1)
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
