"""Folders, files and values that would harm: refused in a few lines, with exit code 2, and never with a traceback."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardwright
from processor_time import takes_less
from shardwright.checkpoint.locking import one_save
from shardwright.checkpoint.manifest import MANIFEST, find, signed
from shardwright.cli.main import app
from shardwright.cli.options import emit

TINY = ["--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4"]
TRAIN = ["train", "--steps", "1", "--ranks", "threads", *TINY]


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def refused(*arguments):
    """The text of a refusal: an error of four lines, and code 2."""
    found = run(*arguments)
    assert found.exit_code == 2, (found.output, found.exception)
    assert found.stderr.startswith("error: ")
    assert all(word in found.stderr for word in ("given:", "allowed:", "fix:")), found.stderr
    return found.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert run(*TRAIN, "--out", out).exit_code == 0
    return out


# ---- a run folder from another person


@pytest.fixture
def hostile(tmp_path):
    """A run folder whose model is a factory that writes a file when it is called."""
    out = tmp_path / "run"
    assert run(*TRAIN, "--out", out).exit_code == 0
    path = out / "run.json"
    found = json.loads(path.read_text())
    found["options"] |= {"model": "subprocess:Popen", "settings": {"args": f"('touch', '{tmp_path / 'executed'}')"}}
    path.write_text(json.dumps(found))
    return out


@pytest.mark.parametrize("verb", ["sample", "train"])
def test_a_factory_that_only_a_folder_names_is_never_imported(hostile, verb, monkeypatch):
    monkeypatch.setattr("importlib.import_module", None)
    command = ["sample", "--from", hostile] if verb == "sample" else ["train", "--resume", "--out", hostile]
    assert "add --model subprocess:Popen" in refused(*command, "--ranks", "threads")
    assert "has another model" in refused(*command, "--ranks", "threads", "--model", "os:system")
    assert not (hostile.parent / "executed").exists()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "report.html"])
@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_a_link_in_a_run_folder_never_makes_a_run_write_elsewhere(tmp_path, name, flags):
    out, other = tmp_path / "run", tmp_path / "other"
    if flags:
        assert run(*TRAIN, "--out", out).exit_code == 0
        (out / name).unlink()
    else:
        out.mkdir()
    other.write_text("mine\n")
    (out / name).symlink_to(other)
    assert f"'{out / name}' is no regular file" in refused("train", *flags, "--ranks", "threads", "--out", out)
    assert other.read_text() == "mine\n"


def test_a_file_in_place_of_the_folder_of_checkpoints_is_refused_before_any_step(tmp_path):
    (tmp_path / "checkpoints").touch()
    assert f"'{tmp_path / 'checkpoints'}' is no folder" in refused(*TRAIN, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_lock_that_is_a_link_empties_no_file(trained, tmp_path):
    (tmp_path / "other").write_text("mine\n")
    (tmp_path / ".saving").symlink_to(tmp_path / "other")
    with one_save(tmp_path):
        assert (tmp_path / "other").read_text() == "mine\n"


@pytest.mark.sampled(0)
def test_a_factory_that_the_command_names_too_is_resumed_and_a_file_of_options_counts(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    own = ["--model", "torch.nn:Embedding", "--set", "num_embeddings=256", "--set", "embedding_dim=256"]
    data = ["--data", tmp_path / "text", "--seq", "8", "--batch", "2", "--ranks", "threads", "--out", tmp_path / "run"]
    assert run("train", "--steps", "1", *own, *data).exit_code == 0
    again = ["train", "--resume", "--steps", "2", "--ranks", "threads", "--out", tmp_path / "run"]
    assert "add --model torch.nn:Embedding" in refused(*again)
    assert run(*again, "--model", "torch.nn:Embedding").exit_code == 0
    (tmp_path / "options.toml").write_text("model = 'torch.nn:Embedding'\nsteps = 3\n")
    assert run(*again[:2], *again[4:], "--config", tmp_path / "options.toml").exit_code == 0


EMBEDDING = "torch.nn:Embedding"
OF_A_FOLDER = {
    "sample": ["sample", "--num", "1", "--from"],
    "sample of other data": ["sample", "--num", "1", "--data", "stdlib", "--from"],
    "evaluate": ["evaluate", "--num", "1", "--from"],
    "predict": ["predict", "--num", "1", "--from"],
    "report": ["report"],
    "replay": ["plan", "--replay"],
    "resume": ["train", "--resume", "--steps", "2", "--ranks", "threads", "--out"],
    "resume other data": ["train", "--resume", "--steps", "2", "--ranks", "threads", "--data", "stdlib", "--out"],
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run of a user's own model on text."""
    out = tmp_path_factory.mktemp("own") / "run"
    own = ["--model", EMBEDDING, "--set", "num_embeddings=256", "--set", "embedding_dim=256"]
    assert run(*TRAIN[:5], "--seq", "8", "--batch", "2", *own, "--out", out).exit_code == 0
    return out


@pytest.fixture
def payload(tmp_path, monkeypatch):
    """A module that leaves a file behind when it is imported, and a function that says whether it was."""
    (tmp_path / "payload.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'executed')!r}).touch()\ndef f(*_): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "executed").exists
    sys.modules.pop("payload", None)


@pytest.mark.parametrize("where", ["top", "parts"])
@pytest.mark.parametrize("option", ["data", "model"])
@pytest.mark.parametrize("verb", OF_A_FOLDER)
def test_code_that_a_folder_names_in_its_options_or_those_of_a_part_never_runs(
    own, payload, tmp_path, verb, option, where
):
    out = shutil.copytree(own, tmp_path / "run")
    kept = json.loads((out / "run.json").read_text())
    for each in [kept] if where == "top" else kept["parts"]:
        each["options"][option] = "payload:f"
    for each in [kept, *kept["parts"]]:
        each["measured"] = {"step_s": 1.0}
    (out / "run.json").write_text(json.dumps(kept))
    found = run(*OF_A_FOLDER[verb], out, "--model", EMBEDDING)
    assert found.exit_code in (0, 2), (found.output, found.exception)
    assert not payload()


def test_data_that_the_command_names_too_are_replayed_and_reported(own, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef data():\n    return [(torch.arange(8), torch.arange(8))] * 8\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = shutil.copytree(own, tmp_path / "run")
    kept = json.loads((out / "run.json").read_text())
    for each in [kept, *kept["parts"]]:
        each["options"]["data"], each["measured"] = "mine:data", {"step_s": 1.0}
    (out / "run.json").write_text(json.dumps(kept))
    assert "add --data mine:data" in refused("plan", "--replay", out, "--model", EMBEDDING)
    assert "add --data mine:data" in run("report", out, "--model", EMBEDDING).stderr
    named = ["--model", EMBEDDING, "--data", "mine:data"]
    assert run("plan", "--replay", out, *named).exit_code == 0
    assert run("report", out, *named).stderr == ""
    assert "a plan of a built-in model reads no data" in refused("plan", "--data", "mine:data")
    sys.modules.pop("mine", None)


NOTES = [
    {"stdlib": "zz"},
    {"stdlib": [None, 3]},
    {"stdlib": {"a": 1}},
    {"stdlib": []},
    {"stdlib": [True, "x"]},
    [1],
    "x",
    None,
]


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.sampled(0)
def test_a_damaged_note_of_the_data_is_refused_unless_the_data_are_accepted(trained, tmp_path, note):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    found = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**found, "data": note}))
    again = ["train", "--resume", "--steps", "2", "--ranks", "threads", "--out", out]
    assert "add --changed-data" in refused(*again)
    assert run(*again, "--changed-data").exit_code == 0
    assert json.loads((out / "run.json").read_text())["data"] == found["data"], "as in a run that can be resumed"


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_a_lock_that_is_a_folder_is_refused(tmp_path, line):
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    told = refused(*TRAIN, "--layout", line, "--out", tmp_path / "run")
    assert f"'{tmp_path / 'run' / '.lock'}' is no regular file" in told


@pytest.mark.parametrize("more", [[], ["--compare"]])
def test_a_circle_of_links_in_place_of_a_run_is_refused_by_report(tmp_path, more):
    circles = [tmp_path / "a", tmp_path / "b"]
    for circle in circles:
        circle.symlink_to(circle)
    refused("report", *circles[: 1 + bool(more)], *more)


# ---- values and files that nothing can be done with


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "--set", "width=1000000000"], "is too large for torch"),
        (["show", "--set", "width=" + "9" * 30], "a whole number of up to 64 bits"),
        (["show", "--set", "num_layers=100000000"], "too many layers"),
        (["show", "--model", "mlp", "--set", "widths=1000000000000,10"], "is too large for torch"),
        (["show", "--batch", "1" + "0" * 18], "the batch is too large"),
        (["verify", "--set", "width=10000000"], "the model does not fit on this machine"),
        (["train", "--set", "width=10000000", "--out", "out"], "the model does not fit on this machine"),
        (["train", "--timeout-s", "1e300", "--out", "out"], "'timeout_s' is out of range"),
        (["train", "--timeout-s", "1e-9", "--out", "out"], "'timeout_s' is out of range"),
        ([*TRAIN, "--out", "x" * 300], "cannot write to"),
        (["train", "--resume", "--out", "x" * 300], "there is no run at"),
        (["sample", "--from", "x" * 300], "there is no run at"),
        (["checkpoint", "inspect", "x" * 300], "cannot be used"),
        (["verify", "--data", "x" * 300], "cannot be used"),
        (["show", "--config", "/dev/zero"], "no regular file"),
        (["show", "--config", "/dev/null"], "no regular file"),
        (["show", "--layout", "pp2/file:/dev/zero"], "no regular file"),
        (["show", "--png", "x" * 300], "cannot be used"),
        (["train", "--seed", "9" * 20, "--out", "out"], "a whole number of up to 64 bits"),
        (["verify", "--seed", "9" * 20], "a whole number of up to 64 bits"),
        (["verify", "--model", "torch.nn:Linear", "--set", "in_features=4", "--set", "out_features=4"], "cannot take"),
        (["show", "--set", "width=\udcff"], "'width' does not have the right type"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["dp1000000", "pp1048576", "dp1048576 tp1048576", "tp1048576", "pp1048576 mb1048576"])
@pytest.mark.parametrize("verb", ["train", "train processes", "verify", "sample"])
@pytest.mark.sampled(3)
def test_more_ranks_than_the_machine_can_start_are_refused_by_number_in_a_second(trained, tmp_path, verb, line):
    more = {
        "train": ["--batch", "1048576", "--seq", "1", "--ranks", "threads", "--out", tmp_path / "run"],
        "train processes": ["--batch", "1048576", "--seq", "1", "--out", tmp_path / "run"],
        "verify": ["--batch", "1048576", "--seq", "1"],
        "sample": ["--from", trained],
    }
    said = []
    assert takes_less(1, lambda: said.append(refused(verb.split()[0], "--layout", line, *more[verb])))
    assert all("more ranks than this machine can start" in each for each in said)
    assert not (tmp_path / "run").exists()


def test_processes_are_counted_by_the_memory_that_each_needs(tmp_path):
    words = ["train", "--layout", "dp5000", "--batch", "5000", "--seq", "1", *TINY, "--out", tmp_path / "run"]
    assert "5,000 ranks that are processes" in refused(*words)


@pytest.mark.parametrize(("most", "told"), [(1, True), (2, False)])
def test_verify_says_that_very_many_threads_take_minutes(monkeypatch, most, told):
    monkeypatch.setattr(sys.modules["shardwright.cli.main"], "MANY_THREADS", most)
    found = run("verify", "--layout", "dp2", "--steps", "1", *TINY)
    assert found.exit_code == 0
    assert ("2 ranks take turns as threads of one process, which takes minutes" in found.stderr) == told


def test_a_million_chunks_are_refused_by_number_before_their_schedule_is_written():
    said = []
    assert takes_less(2, lambda: said.append(refused("show", "--layout", "pp2/interleaved:v1000000 mb4", *TINY)))
    assert all("of 1000000 chunks each" in each for each in said)


@pytest.mark.sampled(0)
def test_show_takes_a_million_ranks_and_refuses_a_million_stages_by_number():
    assert "1,000,000 ranks" in run("show", "--layout", "dp1000000", *TINY).stdout
    assert "cannot be cut into 1048576 stages" in refused("show", "--layout", "pp1048576", *TINY)


@pytest.mark.sampled(0)
def test_plan_takes_a_million_ranks_in_seconds():
    words = ["plan", "--layout", "dp1000000", "--cluster", "a100-80gb:125000x8", "--batch", "1000000", "--seq", "16"]
    words += ["--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=4"]
    said = []
    assert takes_less(20, lambda: said.append(run(*words).stdout))
    assert all("dp1000000: " in each for each in said)


def test_a_model_of_ones_own_that_cannot_take_the_data_is_refused_by_train_too(tmp_path):
    own = ["--model", "torch.nn:Linear", "--set", "in_features=4", "--set", "out_features=4"]
    assert "cannot take the data 'stdlib'" in refused("train", *own, "--ranks", "threads", "--out", tmp_path / "run")


@pytest.mark.parametrize(
    "text",
    [
        "steps = " + "[" * 5000 + "]" * 5000,
        "[settings]\nwidth = " + "[" * 500 + "]" * 500,
        "steps = " + "9" * 5000,
        "a" + ".a" * 7000 + " = 1",
        "a" * 2**15 + " = 1",
    ],
    ids=["arrays", "arrays in a table", "a long number", "dots", "a long file"],
)
def test_a_file_of_options_that_is_nested_or_long_is_refused(text, tmp_path):
    (tmp_path / "options.toml").write_text(text + "\n")
    refused("show", "--config", tmp_path / "options.toml")


@pytest.mark.parametrize(
    "flags", [["--temperature", "1e-320"], ["--temperature", "1e308"], ["--prompt", "\udcff\udc80"], ["--seed", "-1"]]
)
def test_extreme_values_of_sampling_work(trained, flags):
    found = run("sample", "--from", trained, "--num", "2", *flags)
    assert found.exit_code == 0, (found.output, found.exception)


@pytest.mark.parametrize("num", [-1, 2**20 + 1, 10**18])
def test_the_number_of_samples_has_limits(trained, num):
    assert "allowed: 0 to 1048576" in refused("sample", "--from", trained, "--num", num)


def test_the_seed_of_a_sample_is_checked(trained):
    assert "the seed is out of range" in refused("sample", "--from", trained, "--seed", "9" * 20)


def code_that_signals(name):
    return f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_stop_signal_while_the_command_imports_ends_it_in_one_line(tmp_path, name):
    (tmp_path / "torch.py").write_text(f"{code_that_signals('SIGUSR1')}{code_that_signals(name)}time.sleep(9)\n")
    source = Path(shardwright.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{source}"}
    for command in (["-m", "shardwright.cli"], [tmp_path / "shardwright"]):
        (tmp_path / "shardwright").write_text("from shardwright.cli import main\nmain()\n")
        done = subprocess.run(
            [sys.executable, *command, "--help"], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


FIRST_IMPORT = """import os, signal, sys
class Finder:
    seen = False
    def find_spec(self, name, *_):
        if self.seen and not name.startswith("shardwright"):
            os.kill(os.getpid(), signal.SIGINT)
        self.seen |= name == "shardwright"
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("name", ["module", "script"])
def test_ctrl_c_at_the_first_import_that_the_library_makes_ends_the_command_in_one_line(tmp_path, name):
    (tmp_path / "sitecustomize.py").write_text(FIRST_IMPORT)
    (tmp_path / "shardwright").write_text("from shardwright.cli import main\nmain()\n")
    command = ["-m", "shardwright.cli"] if name == "module" else [str(tmp_path / "shardwright")]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(shardwright.__file__).parents[1]}"}
    words = [sys.executable, *command, "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.sampled(0)
def test_ctrl_c_while_python_ends_prints_nothing(tmp_path):
    told = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    (tmp_path / "sitecustomize.py").write_text(told)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(shardwright.__file__).parents[1]}"}
    words = [sys.executable, "-m", "shardwright.cli", "--version"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("shardwright ")
    assert (done.returncode, done.stderr) == (-2, "")


@pytest.mark.sampled(0)
def test_a_stop_signal_before_the_command_runs_ends_it_in_one_line_and_an_early_warning_changes_nothing(tmp_path):
    signals = code_that_signals("SIGUSR1") + code_that_signals("SIGTERM")
    runs = f"assert gc.isenabled() and gc.get_freeze_count() > 1e5\n{signals}"
    (tmp_path / "shardwright").write_text(
        f"import gc, sys, shardwright.cli\nfound = sys.modules['shardwright.cli.main']\n"
        f"found.app = lambda: exec({runs!r})\nassert not gc.isenabled()\nfound.main()\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "shardwright"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("name", "words", "collects"),
    [
        ("module", "--version", True),
        ("script", "--version", True),
        ("module", "plan --help", False),
        ("module", "plan --ranks 2 --help", True),
        ("module", "plan --ranks=2,4 --help", True),
    ],
)
def test_the_command_collects_garbage_once_all_is_imported_but_for_a_plan_of_one_number_of_ranks(
    tmp_path, name, words, collects
):
    (tmp_path / "shardwright").write_text("from shardwright.cli import main\nmain()\n")
    told = f"open({str(tmp_path / 'found')!r}, 'w').write(f'{{gc.isenabled()}} {{gc.get_freeze_count() > 1e5}}')"
    (tmp_path / "sitecustomize.py").write_text(f"import atexit, gc\natexit.register(lambda: {told})\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(shardwright.__file__).parents[1]}"}
    command = ["-m", "shardwright.cli"] if name == "module" else [str(tmp_path / "shardwright")]
    done = subprocess.run([sys.executable, *command, *words.split()], env=environment, capture_output=True, check=True)
    assert b"shardwright " in done.stdout
    assert (tmp_path / "found").read_text() == f"{collects} True"


def test_signals_that_the_command_is_started_to_ignore_stay_ignored(tmp_path):
    names = ("SIGHUP", "SIGINT", "SIGUSR1")
    (tmp_path / "torch.py").write_text("".join(map(code_that_signals, names)) + "os._exit(7)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(shardwright.__file__).parents[1]}"}
    ignored = "".join(f"signal.signal(signal.{name}, signal.SIG_IGN); " for name in names)
    code = f"import os, signal, sys; {ignored}os.execv(sys.executable, ['python', '-m', 'shardwright.cli'])"
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 7


OPENED = """import os, sys
null = os.stat(os.devnull)
are_open = all(os.path.samestat(os.fstat(number), null) and os.get_inheritable(number) for number in range(3))
sys.stdout.flush()
sys.stderr.flush()
os._exit(0 if are_open else 1)
"""


def test_no_file_that_a_command_opens_takes_the_place_of_its_closed_input_output_or_error(tmp_path):
    (tmp_path / "torch.py").write_text(OPENED)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(shardwright.__file__).parents[1]}"}
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "shardwright.cli"]
    assert subprocess.run(words, env=environment, check=False).returncode == 0


@pytest.mark.sampled(0)
def test_a_program_that_imports_the_library_keeps_its_signals(tmp_path):
    now = "[signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]"
    code = f"import signal; before = {now}; import shardwright.cli.main; assert {now} == before"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    (tmp_path / "bench.py").write_text(code)
    words = [sys.executable, str(tmp_path / "bench.py"), "shardwright", "-m", "shardwright.cli"]
    assert subprocess.run(words, check=False).returncode == 0


# ---- export


def test_a_terminal_obeys_no_name_of_a_checkpoint(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    manifest = find(run / "checkpoints") / MANIFEST
    entries = json.loads(manifest.read_text())
    del entries["sha256"]
    manifest.write_text(signed(json.dumps(entries | {"layout": "dp2\x1b]0;title\x07\x1b[2J"}, indent=1)))
    found = CliRunner().invoke(app, ["checkpoint", "inspect", str(run)])
    assert found.exit_code == 0
    assert r"dp2\x1b]0;title\x07\x1b[2J" in found.output


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_result_whose_reader_has_gone_is_dropped_and_one_on_a_full_disk_is_told(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:  # as of "| head -1"; it raises when it is closed unless what it holds goes elsewhere
        monkeypatch.setattr("sys.stdout", out)
        emit({}, "text", as_json=False)
    with open("/dev/full", "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(OSError, match="No space left"):
            emit({}, "text", as_json=True)


def test_export_writes_beside_and_leaves_nothing_else(trained, tmp_path):
    to = tmp_path / "new" / "model.safetensors"
    assert run("checkpoint", "export", trained, to).exit_code == 0
    before = to.stat().st_ino
    assert run("checkpoint", "export", trained, to).exit_code == 0
    assert to.stat().st_ino != before
    assert [path.name for path in to.parent.iterdir()] == [to.name]


@pytest.mark.parametrize("kind", ["a device", "a pipe", "a folder", "a link", "a name that is too long"])
def test_export_refuses_a_target_that_is_no_regular_file_and_leaves_it(trained, tmp_path, kind):
    to = tmp_path / ("x" * 300 if "long" in kind else "target.safetensors")
    if kind == "a device":
        try:
            os.mknod(to, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "a pipe":
        os.mkfifo(to)
    elif kind == "a folder":
        to.mkdir()
    elif kind == "a link":
        to.symlink_to(tmp_path / "elsewhere")

    def found():
        now = to.lstat()
        return now.st_ino, now.st_mode, now.st_mtime_ns  # a link that is looked at has another time of access

    before = found() if "long" not in kind else None
    assert f"cannot write '{to}'" in refused("checkpoint", "export", trained, to)
    assert before is None or found() == before
    assert len(list(tmp_path.iterdir())) == (before is not None)


def test_export_of_a_broken_checkpoint_is_refused_and_writes_nothing(trained, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shardwright.weights.stores.read_pieces", fails)
    assert "could not be read" in refused("checkpoint", "export", trained, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []
