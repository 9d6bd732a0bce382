"""`funccoll schedule`: tables, JSON, drawings and exports, and what it says about options that do not fit."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import funccoll.schedules as fs
from funccoll.schedules.collective import KINDS
from funccoll.tools.cli import main
from tests.support.machine_profiles import in_use, parameters, profile, times
from tests.support.oracles.msccl_rules import check_rules

pytestmark = pytest.mark.covers("commands")


@pytest.fixture
def command(capsys):
    """Runs `funccoll schedule` in this process; returns (exit code, stdout, stderr)."""

    def run(line: str) -> tuple[int, str, str]:
        try:
            code = main(["schedule", *line.split()])
        except SystemExit as exit:
            code = int(str(exit.code))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def words(text: str) -> str:
    """A text with single spaces."""
    return " ".join(text.split())


def test_the_list_has_every_algorithm_and_its_sizes(command):
    code, out, _ = command("--list")
    assert code == 0
    for kind in KINDS:
        for name in fs.algorithms(kind):
            assert name in out, (kind, name)
    line = next(line for line in out.splitlines() if "recursive_halving" in line)
    assert "powers of two" in line and "--" not in line
    assert "--root --chunks" in next(line for line in out.splitlines() if "pipelined_chain" in line)


def test_the_list_as_json(command):
    rows = json.loads(command("--list --json")[1])
    assert [(r["collective"], r["algorithm"]) for r in rows] == [(k, a) for k in KINDS for a in fs.algorithms(k)]
    assert {r["ranks"] for r in rows} == {"any", "powers of two"} and all(r["text"] for r in rows)
    few = json.loads(command("all_gather --list --ranks 6 --json")[1])
    assert [r["algorithm"] for r in few] == fs.algorithms("all_gather", 6)


def test_a_schedule_s_table(command):
    code, out, err = command("all_reduce --ranks 8 --algorithm ring --bytes 1MiB")
    assert (code, err) == (0, "")
    text = words(out)
    for part in (
        "schedule ring for all_reduce on 8 ranks A ring reduce_scatter, then a ring all_gather",
        "rounds 14, with 112 moves in all; 8 chunks per block",
        "sent 1,835,008 bytes",
        "reduced 917,504 bytes",
        "time 278 µs predicted for 1 MiB per rank on one_host",
        "proof proved: every output holds exactly what it must; reductions combine in an order of its own, the same on all "
        "ranks; 48 partial sums are written, which 16-bit floats round",
        "reads every rank r, r - 1 (modulo ranks)",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (
            "all_reduce --ranks 4 --algorithm two_shot",
            "in rank order, one left fold; no partial sum is written reads every rank, all others writes",
        ),
        ("broadcast --ranks 5 --root 2 --algorithm flat", "reads rank 0: 2 rank 1: 2 rank 3: 2 rank 4: 2"),
        ("gather --ranks 6 --algorithm flat", "reads rank 0: 1 to 5"),
        ("barrier --ranks 4 --algorithm dissemination", "reads every rank r, r - 2, r - 1 (modulo ranks)"),
        ("all_reduce --ranks 1 --algorithm ring", "no rank reads another's memory"),
        ("permute --ranks 3 --pairs 0:1,2:0 --algorithm direct", "rounds 1, with 2 moves in all"),
        ("all_gather --ranks 4 --algorithm ring --channels 2", "1 chunk per block and channel, 2 channels"),
        ("broadcast --ranks 4 --algorithm pipelined_chain --chunks 5", "5 chunks per block"),
        ("all_reduce --ranks 8 --algorithm hierarchical --levels 2x4 --topology nvlink_infiniband:2x4", "on nvlink_infiniband"),
        ("all_reduce --ranks 4 --algorithm hierarchical --hosts 0,1,0,1", "reads rank 0: 1, 2 rank 1: 0, 3"),
        ("all_reduce --ranks 4 --algorithm ring --hosts 2x2", "predicted for 1 MiB per rank on hosts"),
        ("all_gather --ranks 16 --algorithm ring --topology torus:4x4", "on torus"),
        ("all_gather --ranks 24 --algorithm recursive_doubling --topology one_host", None),
        ("gather --ranks 40 --algorithm binomial", "... and 4 more ranks"),
        ("all_reduce --ranks 4 --bytes 1.5KiB --algorithm ring", "1.5 KiB"),
    ],
)
def test_lines_of_tables(command, line, what):
    code, out, err = command(line)
    if what is None:
        assert code == 2 and "needs a power of two of ranks, not 24. For 24 ranks there are: direct, ring" in err
    else:
        assert code == 0 and what in words(out), out


def test_without_an_algorithm_the_choice_is_explained(command):
    code, out, _ = command("all_reduce --ranks 8")
    table = repr(fs.explain("all_reduce", 8, 1 << 20))
    assert code == 0 and out.startswith(table) and "schedule  two_shot for all_reduce on 8 ranks" in out
    _, out, _ = command("all_reduce --ranks 4 --topology ethernet:2x2 --bytes 64KiB --dtype bfloat16")
    assert "65,536 bytes of bfloat16, on ethernet" in out and "16-bit floats: would round" in out


def test_the_choice_on_hosts(command):
    code, out, _ = command("all_reduce --ranks 5 --hosts 0,0,0,1,1")
    hosts = (0, 0, 0, 1, 1)
    table = fs.explain("all_reduce", fs.Topology.of_hosts(hosts), 1 << 20)
    assert code == 0 and out.startswith(repr(table)) and "in an order of its own" in words(out)
    chosen = json.loads(command("all_reduce --ranks 5 --hosts 0,0,0,1,1 --algorithm hierarchical --json")[1])
    assert chosen["hosts"] == list(hosts) and chosen["levels"] is None


def test_figures_as_json(command):
    code, out, _ = command("broadcast --ranks 5 --root 2 --algorithm binomial --bytes 4096 --json")
    found, schedule = json.loads(out), fs.build("broadcast", 5, "binomial", root=2)
    cost = schedule.cost(fs.Topology.one_host(5), 4096)
    assert code == 0 and (found["collective"], found["algorithm"], found["root"], found["ranks"]) == (
        "broadcast",
        "binomial",
        2,
        5,
    )
    assert (found["rounds"], found["moves"], found["bytes"]) == (3, len(schedule.moves), 4096)
    assert (found["seconds"], found["bytes_sent"]) == (cost.seconds, cost.bytes_sent)
    assert found["left_fold"] is None and found["candidates"] is None and found["proved"] is True
    assert found["reads"][2] == [] and sum(map(len, found["reads"])) == 4
    chosen = [row for row in json.loads(command("all_reduce --ranks 4 --json")[1])["candidates"] if row["chosen"]]
    assert [row["algorithm"] for row in chosen] == [fs.select("all_reduce", 4, 1 << 20).algorithm]


def test_measured_times_stand_beside_predicted_ones(command):
    with in_use(profile(parameters(4), measured=[times(ranks=4, seconds=(1e-6, 2e-6, 8e-6))])):
        _, out, _ = command("all_reduce --ranks 4 --algorithm two_shot --bytes 4096")
        assert re.search(r"predicted for 4 KiB per rank on one_host; 2 µs measured here", words(out)), out
        found = json.loads(command("all_reduce --ranks 4 --algorithm two_shot --bytes 4096 --json")[1])
        assert found["measured_seconds"] == 2e-6
    assert json.loads(command("all_reduce --ranks 4 --algorithm two_shot --json")[1])["measured_seconds"] is None


# ---------------------------------------------------------------- files


def test_exports_are_printed_alone_or_written(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule = fs.build("all_reduce", 4, "ring")
    check_rules(command("all_reduce --ranks 4 --algorithm ring --export msccl")[1])
    wanted = {
        "msccl": schedule.to_msccl_xml(),
        "json": schedule.to_json(),
        "goal": schedule.to_goal(1 << 20),
        "perfetto": schedule.to_perfetto(None, fs.Topology.one_host(4), 1 << 20),
    }
    for format, text in wanted.items():
        line = f"all_reduce --ranks 4 --algorithm ring --export {format}"
        assert command(line) == (0, text, "")
        code, out, _ = command(f"{line} --out file.{format}")
        assert code == 0 and "schedule  ring" in out and out.endswith(f"exported to file.{format}\n")
        assert Path(f"file.{format}").read_text() == text
        found = json.loads(command(f"{line} --out file.{format} --json")[1])
        assert found["export"] == {"format": format, "file": f"file.{format}"}
    assert sorted(os.listdir()) == [f"file.{f}" for f in sorted(wanted)]  # nothing else is left
    assert stat.S_IMODE(os.stat("file.json").st_mode) == 0o666 & ~_umask()
    assert 'name="two_shot"' in command("all_reduce --ranks 4 --export msccl")[1]  # the one that is chosen


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_export_to_a_device_is_written_there(command):
    assert command("all_reduce --ranks 2 --algorithm ring --export json --out /dev/null")[0] == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_drawing(command, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = command(f"all_reduce --ranks 4 --algorithm ring --draw {tmp_path / 'ring.svg'}")
    assert code == 0 and out.endswith(f"drawn to {tmp_path / 'ring.svg'}\n") and "<svg" in (tmp_path / "ring.svg").read_text()
    _, out, _ = command(f"all_reduce --ranks 2 --draw {tmp_path / 'a.png'} --json")
    assert json.loads(out)["drawing"] == str(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_drawing_without_the_extra_names_the_command(tmp_path):
    """matplotlib cannot be imported in this process."""
    code = "import sys; sys.modules['matplotlib'] = None; from funccoll.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    line = ["schedule", "all_reduce", "--ranks", "2", "--draw", str(tmp_path / "x.svg")]
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pip install" in done.stderr and "funccoll[draw]" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", r"name a collective \(all_reduce, all_gather, .*barrier\), or list all algorithms with --list"),
        ("all_reduce", "give the number of ranks: funccoll schedule all_reduce --ranks 8"),
        ("all_educe --ranks 4", "unknown collective 'all_educe'. Did you mean 'all_reduce'. Use one of all_reduce, all_gather"),
        ("all_educe --list", "unknown collective 'all_educe'. Did you mean 'all_reduce'"),
        (
            "all_reduce --ranks 4 --algorithm rng",
            "unknown algorithm 'rng' for all_reduce. Did you mean 'ring'. For 4 ranks there are: two_shot",
        ),
        ("all_reduce --ranks 1,000,000", "argument --ranks: '1,000,000' must be a number, at least 1, in digits alone"),
        (
            "all_reduce --ranks 1000000",
            "--ranks 1,000,000: this command takes at most 1,024, .* fc.schedules.build.'all_reduce', 1000000",
        ),
        (f"all_reduce --ranks {'9' * 5000}", "must be a number, at least 1"),
        ("all_reduce --ranks 0", "'0' must be a number, at least 1"),
        ("all_reduce --ranks -3", "'-3' must be a number, at least 1"),
        ("all_reduce --ranks", "--ranks: expected one argument"),
        ("all_reduce --ranks 3 --algorithm rng --export x", "unknown format 'x'. There are: msccl, goal, perfetto, json"),
        ("all_reduce --ranks 3 --export mscl", "unknown format 'mscl'. Did you mean 'msccl'"),
        ("all_reduce --ranks 3 --out x", "--out needs --export, one of msccl, goal, perfetto, json"),
        (
            "all_reduce --ranks 3 --export json --json",
            "--export prints the file, and --json the figures: write the file with --out",
        ),
        ("permute --ranks 3 --export msccl", "permute has no MSCCL XML: MSCCL's runtimes have all_reduce"),
        ("all_gather --ranks 3 --export goal", "nbytes=1,048,576: all_gather on 3 ranks cuts them into 3 blocks"),
        (
            "all_reduce --ranks 3 --topology ethrnet",
            "unknown topology 'ethrnet'. Did you mean 'ethernet'. There are: one_process, one_host",
        ),
        ("all_reduce --ranks 3 --topology ethernet:2x2", "--topology ethernet:2x2 has 4 ranks, and --ranks is 3"),
        ("all_reduce --ranks 3 --topology one_host:3", "a topology of one host has no shape"),
        ("all_reduce --ranks 12 --topology nvlink_infiniband", "12 ranks are not hosts of 8; give hosts x ranks per host"),
        ("all_reduce --ranks 3 --topology torus:x", "a shape is sizes with x between them, such as torus:4x2"),
        ("all_reduce --ranks 3 --topology torus:", "a shape is sizes with x between them"),
        ("all_reduce --ranks 4 --bytes 1.5", "'1.5' must be a whole number of bytes, such as 4096, 64KiB"),
        ("all_reduce --ranks 4 --bytes 1XB", "'1XB' must be a whole number of bytes"),
        ("all_reduce --ranks 4 --bytes -1", "bytes"),
        ("all_reduce --ranks 4 --bytes 0", "nbytes=0 must be"),
        ("all_reduce --ranks 4 --bytes 99999999999GiB", "whole number of bytes"),
        ("all_reduce --ranks 4 --root 1", "all_reduce has no root, and root=1 was given. Collectives with a root: broadcast"),
        ("broadcast --ranks 4 --root 4", "broadcast: root=4 must be a rank, an integer from 0 to 3"),
        ("broadcast --ranks 4 --root x", "argument --root: invalid int value: 'x'"),
        (
            "all_reduce --ranks 4 --algorithm ring --chunks 3",
            "has its own number of chunks, .* these take chunks: double_binary_tree",
        ),
        ("all_reduce --ranks 4 --chunks 3", "--chunks and --channels are for one algorithm: name it with --algorithm"),
        ("all_reduce --ranks 4 --algorithm ring --channels 0", "argument --channels: '0' must be a number, at least 1"),
        ("all_reduce --ranks 4 --algorithm ring --channels 1000000000", "= 4 × 1 × 1,000,000,000: this command"),
        ("broadcast --ranks 4 --algorithm pipelined_chain --chunks 999999", "takes at most 131,072"),
        ("all_reduce --ranks 4 --algorithm hierarchical --levels 3x2", "whose product is the number of ranks, 4"),
        ("all_reduce --ranks 4 --algorithm hierarchical --levels 4", "'4' must be hosts x ranks per host, such as 2x4"),
        ("all_reduce --ranks 4 --hosts 4", "--hosts names the hosts of 1 ranks, and --ranks is 4"),
        ("all_reduce --ranks 4 --hosts 2,x", "must be hosts x ranks per host, such as 2x4, or a host for each rank"),
        ("permute --ranks 4 --pairs 0-1", "'0-1' must be pairs of ranks, source:destination, such as 0:1,1:0"),
        ("permute --ranks 4 --pairs 0:9", "destination 9 in pairs is not a rank"),
        ("all_reduce --ranks 4 --pairs 0:1", "takes no pairs"),
        ("all_reduce --ranks 4 --dtype float17", "unknown dtype 'float17'. Use float32, float16, bfloat16"),
        ("all_reduce --ranks 4 --dtype object", "object"),
        ("all_reduce --ranks 4 --draw x.bmp", "must end in .svg or .png"),
        (
            "all_reduce --ranks 4 --draw x.svg --drawing spacetime",
            "unknown drawing 'spacetime' of a schedule. Did you mean 'space_time'",
        ),
        ("all_reduce --ranks 2 --draw /nonexistent/x.svg", "cannot write '/nonexistent/x.svg': No such file or directory"),
        ("all_reduce --ranks 2 --export json --out /nonexistent/x", "cannot write '/nonexistent/x': No such file or directory"),
        ("all_reduce --ranks 2 --export json --out /", "cannot write '/': Is a directory"),
        ("all_reduce --ranks 2 --export json --out /proc/self/x", "cannot write '/proc/self/x': "),
        ("all_reduce --ranks 4 --rank 4 --frobnicate", "unrecognized arguments: --rank 4 --frobnicate"),
    ],
)
def test_options_that_do_not_fit(command, tmp_path, monkeypatch, line, what):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(line)
    head, _, error = err.partition("funccoll schedule: error: ")
    assert (code, out) == (2, "") and head.startswith("usage: funccoll schedule COLLECTIVE --ranks P") and len(head) < 200
    assert re.search(what, words(error)), error
    assert len(error) < 700 and not list(tmp_path.iterdir())


def test_help_names_every_option():
    done = subprocess.run([sys.executable, "-m", "funccoll", "schedule", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "funccoll schedule all_reduce --ranks 8 --algorithm ring" in words(done.stdout)
    for option in (
        "list",
        "ranks",
        "algorithm",
        "bytes",
        "dtype",
        "topology",
        "root",
        "pairs",
        "chunks",
        "channels",
        "hosts",
        "levels",
        "draw",
        "export",
        "out",
        "json",
    ):
        assert f"--{option}" in done.stdout
