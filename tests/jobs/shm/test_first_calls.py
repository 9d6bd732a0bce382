"""First calls of programs: ranks that pass other arguments are told so, with the argument's name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from funccoll.arrays.value_hash import value_hash
from funccoll.transports.shm.passed_arguments import MOST_TEXT, PassedArgument, PassedArguments, other_types
from tests.support.cases import first_call_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("job-checks")


def check(told, kind, *words):
    """At least one rank has raised an error of this kind with these words; others have raised it too, or tell of it."""
    assert any(found == kind for found, _ in told), told
    for found, text in told:
        assert found in (kind, "PeerFailure") and all(re.search(word, text) for word in words), text
        summary = next(line for line in text.splitlines() if kind != found or "rank" in line)
        assert not summary.endswith(":") and len(summary) < 600, text  # a line says what is wrong


@pytest.mark.parametrize("size", [3, pytest.param(300_000, marks=pytest.mark.slow)])
def test_a_ranks_own_array_is_not_the_global_value(size):
    check(
        launch(cases.own_array, 2, size),
        "ShardingError",
        r"x of norm is not an Array, so it is taken as the global value, and each rank gets its part by P\('d'\)\.",
        r"Ranks 0 and 1 passed different values\. .* own block as fc\.from_local\(x, mesh, P\('d'\)\)",
        r"\n  at .*first_call_cases.py:\d+ in ",
    )


def test_parameters_of_each_ranks_own():
    check(
        launch(cases.own_parameters, 2),
        "ShardingError",
        r"params\['w'\] of loss has the spec P\(\), so it must be equal on all ranks, and ranks 0 and 1 hold different",
        "Make it from the same data and the same random seed",
    )


@pytest.mark.parametrize(
    ("way", "name", "own"),
    [
        ("split", r"x of norm", r"fc\.from_local\(x, mesh, P\('d'\)\)\."),
        ("whole", r"x of norm", r"fc\.from_local, with the axis in its spec\."),
        ("large", r"x of norm", r"fc\.from_local\(x, mesh, P\('d'\)\)\."),
        ("a parameter", r"params\['w'\] of <lambda>", r"fc\.from_local\(x, mesh, P\('d'\)\)\."),
        ("gathered", r"arr\['x'\] of process_allgather", r"fc\.from_local\(x, mesh, P\('d'\)\)\."),
        ("redistributed", r"x of redistribute", r"fc\.from_local\(x, mesh, P\('d'\)\)\."),
    ],
)
def test_values_that_each_rank_has_put(way, name, own):
    check(
        launch(cases.put, 2, way),
        "ShardingError",
        rf"{name} comes from fc\.device_put, which takes the global value, and ranks 0 and 1 put different ones\. Put the same "
        rf"on all ranks \(from one random seed\), or each rank's own block by {own}",
        r"\n  at .*first_call_cases.py:\d+ in ",
    )


def test_one_rank_puts_another_value_than_others_pass():
    check(launch(cases.put, 2, "an argument on other ranks"), "ShardingError", r"[rR]anks 0 and 1 (passed|put) different")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("split", r"is an Array on no mesh of the job, so it is taken as the global value, .* own block as fc\.from_local"),
        ("whole", r"has the spec P\(\), so it must be equal on all ranks, and ranks 0 and 1 hold different values\. "),
    ],
)
def test_values_that_each_rank_has_computed_without_a_mesh(spec, words):
    check(launch(cases.without_a_mesh, 2, spec), "ShardingError", rf"x of norm {words}")


EQUAL = r"has the spec P\(\), so it must be equal on all ranks, and ranks 0 and 1 hold different values\. Make it from the same"


@pytest.mark.parametrize(
    ("way", "ranks", "words"),
    [
        ("whole", 2, rf"x of <lambda> {EQUAL}"),
        ("gathered", 2, rf"arr of process_allgather {EQUAL}"),
        pytest.param("split", 4, r"it must be equal along 'm', and ranks (0 and 1|2 and 3) hold", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_should_be_equal(way, ranks, words):
    told = launch(cases.own_blocks, ranks, way)
    assert any(kind == "ShardingError" for kind, _ in told), told
    for kind, text in told:
        assert kind in ("", "ShardingError", "PeerFailure") and (not kind or re.search(words, text)), told


def test_arguments_for_which_a_note_has_no_room():
    told = launch(cases.many_parameters, 2)
    name = r"params\['layer \d+ of a model'\] of total or one of the \d+ arguments after it must be equal on all ranks"
    check(told, "ShardingError", rf"{name}, and ranks 0 and 1 hold different values\. FUNCCOLL_DEBUG=detail names it\.")


@pytest.mark.parametrize("known", [False, True])
def test_blocks_of_different_shapes(known):
    told = launch(cases.other_blocks, 2, known)
    check(
        told,
        "ProgramMismatch",
        r"ranks [01] and [01] pass different arguments: x of norm is float64\[8, 3\] in "
        r"blocks of \[4, 3\] on rank 0, and float64\[6, 3\] in blocks of \[3, 3\] on rank 1\.",
    )
    for kind, text in told:
        if kind == "ProgramMismatch":
            first, *calls, remedy = text.splitlines()[:4]
            assert first.endswith("on rank 1."), text
            for rank, line in enumerate(sorted(calls)):
                assert line.startswith(f"  rank {rank}: all_reduce"), text
                assert line.endswith(f"in a program of f64[], f64[{4 - rank}, 3]"), text
            assert "fc.uneven_batches" in remedy


def test_a_shorter_batch_is_named_as_the_call_names_it():
    """`DataParallel.step(*batch)` has a function of eight arguments inside."""
    told = launch(cases.shorter_batch, 2)
    words = r"arguments: batch\[0\] of step is float64\[(6|8), 3\] .* \(and 1 more argument\)\."
    check(told, "ProgramMismatch", words, "pad or drop a shorter last batch, or iterate over fc.uneven_batches")


def test_blocks_of_different_shapes_that_are_gathered():
    told = launch(cases.gathered_blocks, 2)
    blocks = r"float64\[8\] in blocks of \[4\] on rank 0, and float64\[6\] in blocks of \[3\] on rank 1\."
    check(told, "ProgramMismatch", rf"pass different arguments: arr of process_allgather is {blocks}")
    assert all("fc.from_local" in text for kind, text in told if kind == "ProgramMismatch")


def test_in_a_loop_of_fixed_length():
    check(launch(cases.in_a_scan, 2), "ShardingError", r"a of scanned is not an Array")


def test_what_is_no_mistake(tmp_path):
    assert launch(cases.legal, 2, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(
    ("way", "ranks", "words"),
    [
        ("parameters", 2, r"key of <lambda> has the spec P\(\), so it must be equal on all ranks, and ranks 0 and 1"),
        ("elementwise", 2, r"x of <lambda> is not an Array, .*\. Ranks 0 and 1 passed different values\. "),
        pytest.param("along the other axis", 4, r"\. Ranks \d and \d passed different values\. ", marks=pytest.mark.slow),
    ],
)
def test_values_of_ranks_that_do_not_communicate(way, ranks, words):
    told = launch(cases.apart, ranks, way)
    found = {text for kind, text in told if kind == "ShardingError"}
    assert found and all(kind in ("", "ShardingError") for kind, _ in told), told  # the first one saw no other
    for text in found:
        assert re.search(words, text) and re.search(r"\n  at .*first_call_cases\.py:\d+ in ", text), text
        assert ("If each rank runs the function for itself, jit it without mesh=." in text) == (ranks == 2), text


def test_iterations_that_differ():
    (kind, text), (other, _) = launch(cases.apart, 2, "iterations")  # the second rank is in one iteration more
    assert (kind, other) == ("ShardingError", "PeerFailure") and "without mesh" not in text, text
    assert text.startswith("x of <lambda> has the spec P(), so it must be equal on all ranks, and ranks 0 and 1 hold"), text


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (300, 700)])
def test_a_hash_is_of_values_in_c_order(shape):
    x = np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)
    assert value_hash(x) == value_hash(np.asfortranarray(x)) == value_hash(x.copy()) > 0
    if x.ndim == 2 and x.size:
        assert value_hash(x) != value_hash(x[::-1]) and value_hash(x) != value_hash(x + 1)


def test_texts_of_arguments_are_found_and_bounded():
    row = lambda n, hash: PassedArgument(f"args[{n}] of f", "float32[3]", "P()", False, hash)
    long = PassedArguments.text("a", 3, 7, [row(n, int(n == 900)) for n in range(1000)])
    assert len(long) < MOST_TEXT and PassedArguments.of(long).rows[900] == row(900, 1)  # those with a hash come first
    texts = [PassedArguments.text(name, serial, 7, [row(0, serial)]) for serial, name in enumerate("ababab")]
    memory = b"\0".join([b"rubbish", *(text.encode() for text in reversed(texts)), texts[4].encode()[:-5], b""])
    assert PassedArguments.of(PassedArguments.find(memory, "a")) == ({0: row(0, 4)}, 7, None)
    torn = texts[4].replace("P()", "P )", 1).encode()  # as it is written
    assert PassedArguments.of(PassedArguments.find(memory.replace(texts[4].encode(), torn), "a")).rows[0].hash == 2
    assert PassedArguments.find(memory, "c") == PassedArguments.find(b"", "a") == "" and not PassedArguments.of("").rows
    one, other = PassedArguments.of(texts[1]), PassedArguments.of(texts[2])
    assert "args[0] of f has the spec P(), so it must be equal on all ranks" in one.other_value(other, (0, 1))
    assert one.other_value(one, (0, 1)) == other_types({0: one, 1: other}, (0, 1)) == ""


def test_types_of_an_argument_on_all_ranks():
    def passed(*types, name="x"):
        return PassedArguments({i: PassedArgument(f"{name}[{i}]", type, "P()", False, 0) for i, type in enumerate(types)})

    three = {2: passed("f64[2]", "f64[]"), 0: passed("f64[4]", "f32[]"), 1: passed("f64[3]", "f64[]"), 3: passed("f64[4]")}
    assert other_types(three, (1, 0)) == (
        "x[0] is f64[4] on ranks 0, 3, f64[3] on rank 1, and f64[2] on rank 2 (and 1 more argument)"
    )
    assert other_types({**three, 1: passed("f64[3]", name="y")}, (2, 0)).startswith("x[0] is f64[4] on ranks 0, 3, and f64[2]")
    assert other_types({**three, 1: passed("f64[3]", name="y")}, (1, 0)) == ""  # another function
    for row in (passed("f64[4]"), passed()):
        assert other_types({0: row, 1: row}, (0, 1)) == ""
    many = {rank: passed("f64[4]" if rank < 12 else "f64[1]") for rank in range(13)}
    assert "on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more, and f64[1] on rank 12" in other_types(many, (0, 12))
