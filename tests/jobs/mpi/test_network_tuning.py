"""`funccoll tune` on several hosts: the fit of the network's parameters, the profile, and real jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from funccoll.config import LAUNCHER_AGENT
from funccoll.core import machine_profile
from funccoll.core.machine_profile import TYPICAL, HostParameters, MachineProfile, NetworkParameters
from funccoll.schedules import Topology
from funccoll.tools.calibration.fit_network import built_on, fit_network
from funccoll.tools.calibration.fit_parameters import Sample
from funccoll.tools.calibration.network_tuning import combined
from funccoll.tools.calibration.timed_cases import ON_HOSTS, cases
from funccoll.tools.calibration.tuning import measured_times
from funccoll.tools.commands import tune_command
from funccoll.tools.commands.tune_tables import print_profile
from tests.support.machine_profiles import parameters, profile, times
from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

pytestmark = pytest.mark.covers("network-tuning")

SIZES = (8**3, 8**5, 8**7)


def simulated(hosts: tuple[int, ...], inside: HostParameters, network: NetworkParameters, noise: float = 0.0, seed: int = 0):
    """Times that the model gives, with noise."""
    rng, machine = np.random.default_rng(seed), Topology.measured_hosts(hosts, inside, network)
    algorithms = {k: [n for n in names if n != "hierarchical" or len(set(hosts)) < len(hosts)] for k, names in ON_HOSTS.items()}
    found = []
    for case in cases(len(hosts), SIZES, {k: tuple(v) for k, v in algorithms.items()}):
        seconds = built_on(case.kind, case.algorithm, hosts).cost(machine, case.nbytes).seconds
        found.append(Sample(*case, seconds * float(np.exp(noise * rng.standard_normal()))))
    return found


@pytest.mark.parametrize(
    ("hosts", "alpha", "beta", "start"),
    [
        ((0, 0, 1, 1), 5e-6, 1e-9, 1e-7),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ((0, 1), 3e-5, 8e-9, 2e-6),
                ((0, 0, 0, 1), 1e-3, 1e-7, 5e-5),
                ((0, 1, 2, 0), 3e-5, 8e-9, 0.0),
            )
        ),
    ],
)
def test_the_fit_finds_the_parameters_that_made_the_times(hosts, alpha, beta, start):
    count, ranks_per_host = 1 + max(hosts), max(map(hosts.count, hosts))
    network = NetworkParameters(count, ranks_per_host, start, alpha, beta)
    found = fit_network(simulated(hosts, TYPICAL, network), hosts, TYPICAL)
    assert (found.parameters.hosts, found.parameters.ranks_per_host) == (count, ranks_per_host) and found.typical_error < 0.01
    assert found.parameters.alpha == pytest.approx(alpha, rel=0.1) and found.parameters.beta == pytest.approx(beta, rel=0.1)
    noisy = simulated(hosts, TYPICAL, network, 0.15)
    noisy[3] = noisy[3]._replace(seconds=20 * noisy[3].seconds)  # something else ran then
    found = fit_network(noisy, hosts, TYPICAL)
    assert found.parameters.alpha == pytest.approx(alpha, rel=0.35) and found.parameters.beta == pytest.approx(beta, rel=0.35)
    held_out = simulated(hosts, TYPICAL, network, seed=1)
    machine = Topology.measured_hosts(hosts, TYPICAL, found.parameters)
    errors = [abs(built_on(s.kind, s.algorithm, hosts).cost(machine, s.nbytes).seconds / s.seconds - 1) for s in held_out]
    assert np.median(errors) < 0.25


def test_too_few_times():
    with pytest.raises(ValueError, match="2 measured times cannot determine 3 parameters"):
        fit_network([Sample("all_gather", "direct", 64, 1e-5)] * 2, (0, 1), TYPICAL)


def measured(hosts, network, inside=TYPICAL):
    """The times of a job on hosts, as `measure_hosts` gives them."""
    plan = simulated(hosts, inside, network)
    rows = measured_times(len(hosts), plan, [[s.seconds] * 3 for s in plan])
    return [replace(m, hosts=hosts) for m in rows]


def test_a_profile_keeps_what_was_measured_before():
    two, four = NetworkParameters(2, 1, 1e-6, 3e-5, 8e-9), NetworkParameters(2, 2, 1e-6, 4e-5, 9e-9)
    first = combined(measured((0, 1), two), (0, 1), {}, None)
    assert first.parameters == () and [n.ranks_per_host for n in first.network] == [1]
    assert MachineProfile.from_json(json.loads(json.dumps(first.to_json()))) == first
    before = replace(first, parameters=(parameters(2),), measured=(*first.measured, times()))
    second = combined(measured((0, 0, 1, 1), four, parameters(2)), (0, 0, 1, 1), {}, before)
    assert [n.ranks_per_host for n in second.network] == [1, 2] and second.parameters == before.parameters
    assert second.network[1].alpha == pytest.approx(4e-5, rel=0.1)
    assert {m.hosts for m in second.measured} == {(), (0, 1), (0, 0, 1, 1)}
    again = combined(measured((0, 1), replace(two, alpha=6e-5)), (0, 1), {}, second)
    assert again.network[0].alpha == pytest.approx(6e-5, rel=0.1) and len(again.measured) == len(second.measured)


def test_tables_of_networks(capsys):
    network = NetworkParameters(2, 2, 1e-6, 3e-5, 8e-9)
    found = combined(measured((0, 0, 1, 1), network), (0, 0, 1, 1), {}, profile(parameters(4), measured=[times(ranks=4)]))
    print_profile(found, False)
    out = capsys.readouterr().out
    for part in ("Parameters of the network", "ranks on one", "Measured times, 4 ranks on 2 hosts (2 + 2)", "hierarchical"):
        assert part in out, part
    print_profile(found, True)
    assert MachineProfile.from_json(json.loads(capsys.readouterr().out)) == found


def test_options_for_jobs(monkeypatch, capsys):
    called = []
    monkeypatch.setattr("funccoll.tools.commands.run_command.main", lambda words, plain: called.append((words, plain)) or 3)
    for given in (["--hosts", "a:2,b:2"], ["--hosts=a:2,b:2"], ["--hosts", "c:1", "--hosts=a:2,b:2"]):
        assert tune_command.main(["--quick", *given, "--out", "x"]) == 3
        command = ["--hosts", "a:2,b:2", "-m", "funccoll", "tune", "--quick", "--out", "x"]
        assert called.pop() == (command, True)
    with pytest.raises(SystemExit):
        tune_command.main(["--host", "a:2,b:2"])
    assert "unrecognized arguments: --host a:2,b:2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune_command.main(["-n", "2", "--hosts", "a:2,b:2"])
    assert "-n is for one host: a job over several hosts is measured with all its processes" in capsys.readouterr().err


# ---------------------------------------------------------------- real jobs


def test_a_job_on_one_host_is_told_what_to_do(tmp_path):
    command = [sys.executable, "-m", "funccoll", "run", "-n", "2", "-m", "funccoll", "tune", "--out", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=network_hosts.PATIENCE)
    assert done.returncode != 0 and not (tmp_path / "x").exists()
    assert "all processes of this job are on one host: `funccoll tune` without a job measures that" in done.stderr


@pytest.mark.skipif(bool(network_hosts.why_not()), reason=network_hosts.why_not())
@pytest.mark.slow
def test_a_job_on_hosts_is_measured(tmp_path):
    """The command starts a job on the hosts, which then measures them."""
    if why_not := mpi_vendors.why_not("openmpi"):
        pytest.skip(why_not)
    path = tmp_path / "profile.json"
    with NetworkHosts(2) as hosts:
        places = "{}:1,{}:1".format(*hosts.addresses)
        environment = {**hosts.mpi("openmpi"), LAUNCHER_AGENT: str(network_hosts.AGENT)}
        command = [sys.executable, "-m", "funccoll", "tune", "--quick", "--hosts", places, "--out", str(path), "--json"]
        done = hosts.on_head(*command, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "measurements" in done.stderr
    found = MachineProfile.from_json(json.loads(path.read_text()))
    assert MachineProfile.from_json(json.loads(done.stdout)) == found
    (network,) = found.network
    # Times of a few small messages may be told as a start of each call alone, or as a time of each message alone.
    assert (network.hosts, network.ranks_per_host) == (2, 1)
    assert 0 < network.start + network.alpha < 1 and 0 <= network.beta < 1e-5
    map_ = (0, 1)
    assert {m.hosts for m in found.measured} == {map_} and found.host["name"] == "host0"
    machine_profile.adopt(found.to_json())
    try:
        machine = Topology.of_hosts(map_)
        assert machine.network.beta == network.beta and machine.memory
    finally:
        machine_profile.release()
