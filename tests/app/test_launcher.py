import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from hydra.conf import ConfigSourceInfo
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict, read_write

from lightning_distlab.strategies import child_command, child_processes
from lightning_distlab.strategies.child_processes import (
    ChildProcesses,
    DeadRank,
    RankDiedError,
    close_job,
    open_children,
)
from lightning_distlab.strategies.launcher import ForkSafeLauncher, HydraSafeLauncher, make_launcher
from lightning_distlab.strategies.stock_ddp import LightningDDP
from tests.app.compose import composed


@contextmanager
def _writable(cfg):
    """Hydra locks its state part by part."""
    with ExitStack() as stack:
        for part in (cfg, cfg.hydra, cfg.hydra.runtime, cfg.hydra.job, cfg.hydra.overrides):
            stack.enter_context(read_write(part))
            stack.enter_context(open_dict(part))
        yield


@pytest.fixture
def job(monkeypatch, tmp_path):
    """A job of a Hydra sweep, as it stands while it runs."""
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=0,1"])
    with composed():
        hydra = HydraConfig.instance().cfg
        with _writable(hydra):
            hydra.hydra.overrides.task = ["seed=1", "+note='a b'", "model.lr=0.1"]
            hydra.hydra.overrides.hydra = [
                "hydra.mode=MULTIRUN",
                "hydra.sweep.dir=x",
                "hydra.verbose=true",
                "+hydra.a=1",
            ]
            hydra.hydra.runtime.output_dir = str(tmp_path / 'seed=1, "x"')
            hydra.hydra.job.num = 1
        yield hydra.hydra


def test_a_child_of_a_sweep_runs_one_job_in_the_same_folder(job):
    command, cwd = child_command.child_command(3)
    words = command[command.index("--config-name") + 2 :]
    assert words[:3] == ["seed=1", "+note='a b'", "model.lr=0.1"]
    assert not {"-m", "seed=0,1", "hydra.mode=MULTIRUN", "hydra.sweep.dir=x"} & set(words)
    assert {"hydra.verbose=true", "+hydra.a=1", "hydra.mode=RUN", "hydra.output_subdir=null"} <= set(words)
    assert {"hydra.job.name=rank3", "hydra.job.num=1"} <= set(words)
    assert cwd == job.runtime.cwd
    parsed = {item.key_or_group: item.value() for item in OverridesParser.create().parse_overrides(words)}
    assert str(parsed["hydra.run.dir"]) == job.runtime.output_dir


def test_a_child_reads_the_same_configuration_files(job):
    command, _ = child_command.child_command(1)
    assert command[command.index("--config-path") + 1].endswith("/conf")
    assert command[command.index("--config-name") + 1] == "train"
    with _writable(HydraConfig.instance().cfg):
        job.runtime.config_sources.append(ConfigSourceInfo(path="/extra", schema="file", provider="command-line"))
    command, _ = child_command.child_command(1)
    assert command[command.index("--config-dir") + 1] == "/extra"


def test_without_hydra_the_command_line_is_repeated(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    assert not HydraConfig.initialized()
    command, cwd = child_command.child_command(1)
    assert command[0] == sys.executable
    assert command[-2:] == ["--lr", "0.1"]
    assert cwd is None


@pytest.mark.parametrize("value", ["plain", "a b", 'q"q', "x=1,y", "back\\slash", "${no}", "[a]", "ends\\"])
def test_quoting_survives_hydras_grammar(value):
    (parsed,) = OverridesParser.create().parse_overrides([f"key={child_command.quoted(value)}"])
    assert OmegaConf.create({"key": str(parsed.value())}).key == value


def test_launcher_by_start_method():
    strategy = LightningDDP()
    assert isinstance(make_launcher(strategy, 2, "fork"), ForkSafeLauncher)
    with pytest.raises(ValueError, match="start_method='thread' is unknown: use one of popen, fork"):
        make_launcher(strategy, 2, "thread")
    with pytest.raises(ValueError, match="timeout_s=0 must be positive"):
        LightningDDP(timeout_s=0)


def _start(code: str, number: int = 2, timeout_s: float = 30.0) -> ChildProcesses:
    children = open_children(0, timeout_s, None)
    children.start(number, lambda rank: ([sys.executable, "-c", code], None))
    return children


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    close_job(failed=True)
    assert child_processes.active_children() is None


def test_a_killed_child_is_named_with_its_signal():
    children = _start("import time; time.sleep(30)")
    os.kill(children.procs[0].pid, signal.SIGKILL)
    explained = children.explain(RuntimeError("[gloo] Connection closed by peer"))
    assert isinstance(explained, RankDiedError)
    assert f"rank 1 (process {children.procs[0].pid}) was killed by SIGKILL" in str(explained)


def test_a_child_that_gave_up_is_named_with_its_exit_code():
    children = _start("raise SystemExit(7)")
    explained = children.explain(RuntimeError("Connection reset by peer"))
    assert "rank 1" in str(explained)
    assert "exit code 7" in str(explained)


def test_an_error_of_our_own_is_not_blamed_on_others():
    children = _start("raise SystemExit(1)")
    children.procs[0].wait()
    assert children.explain(ValueError("density must be in (0, 1]")) is None


def test_a_signal_explains_more_than_the_exit_codes_it_causes():
    children = _start(
        "import os, sys, time; time.sleep(0.1 if os.environ['LOCAL_RANK'] == '2' else 30); sys.exit(1)", 3
    )
    os.kill(children.procs[0].pid, signal.SIGKILL)
    for proc in children.procs:
        proc.wait()
    children.dead = None  # what the watch has seen first, in whichever order
    assert children.find_dead() == DeadRank(1, children.procs[0].pid, -signal.SIGKILL)


def test_closing_puts_the_environment_back(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    _start("import os; raise SystemExit(0 if os.environ['LOCAL_RANK'] == '1' else 1)")
    os.environ.update(LOCAL_RANK="0", MASTER_PORT="9", WORLD_SIZE="2")
    close_job()
    assert os.environ["MASTER_PORT"] == "1234"
    assert "LOCAL_RANK" not in os.environ
    assert "WORLD_SIZE" not in os.environ


def test_closing_reports_a_child_that_failed_at_the_end():
    _start("raise SystemExit(3)")
    with pytest.raises(RankDiedError, match="exit code 3, after training had ended on rank 0"):
        close_job()


def test_closing_after_a_failure_stops_children_that_hang(monkeypatch):
    children = _start("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    monkeypatch.setattr(children, "_wait", lambda grace_s: ChildProcesses._wait(children, 0.3))
    start = time.monotonic()
    close_job(failed=True)
    assert children.procs[0].poll() in (-signal.SIGTERM, -signal.SIGKILL)  # the first, if it had not begun yet
    assert time.monotonic() - start < 15


def test_a_job_that_nobody_closed_is_closed_by_the_next_one(tmp_path):
    first = open_children(0, 30.0, "job 0")
    first.start(2, lambda rank: ([sys.executable, "-c", "pass"], None))
    with composed():
        with _writable(HydraConfig.instance().cfg):
            HydraConfig.instance().cfg.hydra.runtime.output_dir = str(tmp_path)
        strategy = LightningDDP()
        strategy.cluster_environment = _Environment()
        HydraSafeLauncher(strategy, 2)
    assert child_processes.active_children() is None
    assert first.procs[0].poll() == 0


class _Environment:
    creates_processes_externally = False


def test_a_child_ends_when_rank_0_was_killed(tmp_path):
    # parent starts a child, dies; the child has to notice
    child = (
        "import lightning_distlab.strategies.child_processes as c, time, pathlib, os;"
        f"c.watch_parent(1.0); pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time;"
        "env = os.environ | {'DISTLAB_PARENT_PID': str(os.getpid()), 'LOCAL_RANK': '1'};"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], env=env); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.2)
    process.kill()
    text = process.stderr.read()  # ends when the last holder of the pipe, the child, has ended
    process.wait()
    assert f"rank 0 of this machine (process {process.pid}) died; local rank 1 ends" in text
