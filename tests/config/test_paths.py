import stat
from pathlib import Path

import pytest

from tokenpath.config import paths
from tokenpath.protocol.errors import SpecError

FOLDERS = [
    (paths.home_dir, "TOKENPATH_HOME", "XDG_STATE_HOME", ".local/state/tokenpath"),
    (paths.models_dir, "TOKENPATH_MODELS", "XDG_DATA_HOME", ".local/share/tokenpath/models"),
    (paths.cache_dir, "TOKENPATH_CACHE", "XDG_CACHE_HOME", ".cache/tokenpath"),
]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch, tmp_path):
    for _, own, xdg, _ in FOLDERS:
        monkeypatch.delenv(own, raising=False)
        monkeypatch.delenv(xdg, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(("folder", "own", "xdg", "fallback"), FOLDERS)
def test_own_variable_then_xdg_then_home(folder, own, xdg, fallback, monkeypatch, tmp_path):
    assert folder() == tmp_path / "home" / fallback
    monkeypatch.setenv(xdg, str(tmp_path / "xdg"))
    leaf = fallback.partition("tokenpath")
    assert folder() == tmp_path / "xdg" / (leaf[1] + leaf[2])
    monkeypatch.setenv(own, str(tmp_path / "own"))
    assert folder() == tmp_path / "own"


@pytest.mark.parametrize(("folder", "own", "xdg", "fallback"), FOLDERS)
def test_created_for_this_user_only(folder, own, xdg, fallback):
    assert stat.S_IMODE(folder().stat().st_mode) == 0o700
    assert folder().is_dir()  # a second call finds it


def test_relative_xdg_is_ignored_and_relative_own_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert paths.home_dir() == tmp_path / "home/.local/state/tokenpath"
    monkeypatch.setenv("TOKENPATH_HOME", "here")
    assert paths.home_dir() == tmp_path / "here"


def test_tilde_is_home(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENPATH_HOME", "~/state")
    assert paths.home_dir() == tmp_path / "home/state"


def test_a_file_in_the_way_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENPATH_HOME", str(tmp_path / "file"))
    with pytest.raises(SpecError, match=r"file cannot be used as a folder.*set TOKENPATH_HOME"):
        paths.home_dir()
    monkeypatch.setenv("TOKENPATH_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(SpecError, match="cannot be used as a folder"):
        paths.home_dir()


def test_state_file_is_in_home(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENPATH_HOME", str(tmp_path))
    assert paths.state_file() == Path(tmp_path) / "state.db"
