"""Files that are whole or not there."""

import os
import stat

import pytest

from expunge._files import is_hub_id, shown_model, write_whole


def test_a_reader_sees_the_former_file_or_the_new_one(tmp_path):
    target = tmp_path / "file"
    target.write_text("former")
    target.chmod(0o640)

    def write(path):
        path.write_text("new")
        assert target.read_text() == "former"

    write_whole(target, write)
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_the_former_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("former")

    def write(path):
        path.write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_whole(target, write)
    assert target.read_text() == "former"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_text("former")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", lambda path: path.write_text("new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "nowhere" / "file", lambda path: path.write_text("x"))


def test_what_a_model_is_called(tmp_path, monkeypatch):
    assert shown_model("owner/name") == "owner/name"
    assert shown_model("/a/b/model/") == "model"
    assert shown_model("smollm2-135m") == "smollm2-135m"
    for name in ("./a/b", "~/b", "a/b/c", "a/", "/a"):
        assert not is_hub_id(name)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert shown_model("owner/name") == "name"
