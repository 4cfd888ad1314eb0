"""The unit for systemd: systemd accepts it, and it fits the flags of ``penstock serve``."""

import dataclasses
import re
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from penstock.service.app.prepare import _HTTP_GRACE_S
from penstock.service.config.command_line import PREFIX, parse_config
from penstock.service.config.serve_config import ServeConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/systemd"
UNIT = (FOLDER / "penstock.service").read_text(encoding="utf-8")
VARIABLES = (FOLDER / "penstock.env").read_text(encoding="utf-8")
PROGRAM = "/opt/penstock/bin/penstock"
NEWER = {"RestartSteps", "RestartMaxDelaySec"}
"""Settings of systemd 254, which older versions report and ignore."""
HIGHEST_EXPOSURE = 25
"""In tenths, as systemd counts."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)


def settings() -> dict[str, str]:
    """The settings of the unit's service that occur once."""
    parser = RawConfigParser(strict=False, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT)
    return dict(parser["Service"])


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with a program that exists."""
    assert f"\nExecStart={PROGRAM} serve\n" in UNIT
    path = tmp_path / "penstock.service"
    path.write_text(UNIT.replace(PROGRAM, str(Path(sys.executable).with_name("penstock"))), encoding="utf-8")
    return path


def analyze(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def complaints(unit: Path) -> list[str]:
    """The lines that ``systemd-analyze verify`` prints about the unit, without those about settings of newer versions.
    Other units of the machine are not ours."""
    done = analyze("verify", unit)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    unknown = re.compile(rf"Unknown (?:key|key name|lvalue) '({'|'.join(NEWER)})'")
    return [line for line in lines if unknown.search(line) is None]


@needs_systemd
def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert complaints(unit) == []
    assert analyze("verify", unit).returncode == 0


@needs_systemd
@pytest.mark.parametrize(
    ("line", "wrong"),
    [("KillMode=mixed", "KillMode=most"), ("TimeoutStopSec=90", "TimeoutStop=90"), ("Type=exec", "Type=execute")],
)
def test_systemd_reports_a_wrong_setting(unit: Path, line: str, wrong: str) -> None:
    unit.write_text(unit.read_text().replace(f"\n{line}\n", f"\n{wrong}\n"))
    assert len(complaints(unit)) == 1


@needs_systemd
def test_the_sandbox_is_tight(unit: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={HIGHEST_EXPOSURE}", unit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert analyze("security", "--offline=true", "--threshold=5", unit).returncode != 0


def test_what_the_service_needs_is_left_open() -> None:
    """torch compiles to memory, and the service reads /proc of its children and of the machine."""
    assert (
        settings()
        .keys()
        .isdisjoint({"MemoryDenyWriteExecute", "PrivateDevices", "PrivateNetwork", "ProcSubset", "ProtectProc"})
    )


def test_every_variable_names_a_flag() -> None:
    named = set(re.findall(rf"\b{PREFIX}(\w+)=", UNIT + VARIABLES))
    assert len(named) > 10
    assert named <= {field.name.upper() for field in dataclasses.fields(ServeConfig)}


def test_the_variables_are_a_valid_configuration() -> None:
    """All variables together, except for one of two that exclude each other."""
    given = dict(re.findall(rf"^#?({PREFIX}\w+)=(.+)$", VARIABLES, re.MULTILINE))
    assert len(given) > 10
    listen = f"{PREFIX}LISTEN"
    assert parse_config([], {listen: given.pop(listen)}).listen == "unix:/run/penstock/penstock.sock"
    assert parse_config([], given).http_port == 8000


def test_the_service_has_time_to_stop() -> None:
    seconds = float(settings()["TimeoutStopSec"])
    shown = dict(re.findall(rf"^#?({PREFIX}(?:DRAIN_DELAY|SHUTDOWN_GRACE))=(.+)$", VARIABLES, re.MULTILINE))
    assert len(shown) == 2
    for config in (ServeConfig(), parse_config([], shown)):
        assert seconds > config.drain_delay + config.shutdown_grace + _HTTP_GRACE_S
    assert f"TimeoutStopSec= of the unit, which is {seconds:.0f} s" in VARIABLES


def test_every_setting_is_given_once() -> None:
    names = re.findall(r"^(\w+)=", UNIT, re.MULTILINE)
    assert {name for name in names if names.count(name) > 1} == {"Environment"}


@pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed (Debian: systemd)"
)
def test_sysusers_creates_the_users_of_the_unit() -> None:
    command = ["systemd-sysusers", "--dry-run", "--root=/nowhere", str(FOLDER / "penstock.sysusers.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"Creating user '{settings()['User']}'" in done.stdout + done.stderr
    assert f"Creating group '{settings()['Group']}'" in done.stdout + done.stderr
