"""Completion scripts that shells accept, and that complete."""

import shutil
import subprocess

import pytest

from expunge.cli import main
from expunge.cli._completion import script
from expunge.cli._main import COMMANDS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell)
    assert all(name in text for name in COMMANDS)
    assert "tofu" in text


def complete(tmp_path, line):
    """What bash offers at the end of a line."""
    (tmp_path / "completion").write_text(script("bash"))
    words = line.split(" ")
    program = f"""
source {tmp_path / "completion"}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
COMP_LINE='{line}'; COMP_POINT={len(line)}
function=$(complete -p expunge | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function expunge '{words[-1]}' '{words[-2]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(tmp_path):
    assert complete(tmp_path, "expunge un") == ["unlearn"]
    assert complete(tmp_path, "expunge unlearn --optimizer-st") == ["--optimizer-storage"]
    assert set(complete(tmp_path, "expunge unlearn --preset ")) >= {"default", "tofu", "muse-news"}
    assert complete(tmp_path, "expunge evaluate --suite to") == ["tofu"]
    assert complete(tmp_path, "expunge ledger ver") == ["verify"]
