"""The ``hotspa`` command itself: what it says where a package that it needs is missing or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotspa_megatron.cli import doctor, main
from tests.spawn import REPOSITORY


def hotspa(*words: str, hidden: tuple[str, ...] = (), first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a new interpreter, in which ``hidden`` cannot be imported; packages in ``first`` come first."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); "
        f"from hotspa_megatron.cli.main import main; sys.exit(main({list(words)!r}))"
    )
    path = os.pathsep.join(str(folder) for folder in (first, REPOSITORY) if folder is not None)
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


@pytest.mark.parametrize("name", ["rich", "yaml", "numpy"])
def test_a_package_that_is_missing_is_named(name: str) -> None:
    said = one_line(hotspa("doctor", hidden=(name, "rich.console") if name == "rich" else (name,)))
    package = {"yaml": "PyYAML"}.get(name, name)
    assert said.startswith(f"hotspa: {package} cannot be imported (")
    assert said.endswith(f"pip install {package}, or mend its installation\n")


def test_a_package_that_is_half_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise RuntimeError('built for\\nanother Python')\n")
    said = one_line(hotspa("doctor", first=tmp_path))
    assert said.startswith("hotspa: rich cannot be imported (built for); pip install rich")


def test_a_command_that_needs_torch_says_so_and_the_others_do_without(tmp_path: Path) -> None:
    said = one_line(hotspa("profile", "--ranks", "1", "--output", str(tmp_path / "x.yaml"), hidden=("torch",)))
    assert "torch" in said and "this command needs; see hotspa doctor" in said
    (tmp_path / "hotspa.yaml").write_text("strategies: []\n")
    done = hotspa("explain", str(tmp_path / "hotspa.yaml"), hidden=("torch", "megatron"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("place", ["_missing", "examine"], ids=["as it begins", "at work"])
def test_ctrl_c_is_one_line_wherever_a_command_is(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main if place == "_missing" else doctor, place, interrupted)
    assert main.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "hotspa: interrupted\n")


@pytest.mark.parametrize(("release", "fix"), [("0.16.2", True), ("0.17.0", False), ("0.19.9", False), ("0.20.0", True)])
def test_doctor_knows_the_releases_that_a_job_takes(release: str, fix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_probe", lambda name, module: (release, None))
    found = doctor._required("megatron-core", "megatron")
    assert found.fix == ("install one of the releases 0.17 to 0.19, which are known to work" if fix else "")


def test_doctor_looks_at_all_that_setup_cfg_asks_for() -> None:
    import configparser

    metadata = configparser.ConfigParser()
    metadata.read(REPOSITORY / "setup.cfg")
    wanted = {line.split(">")[0].lower() for line in metadata["options"]["install_requires"].split()}
    assert wanted == {name.lower() for name, _ in doctor._REQUIRED}
