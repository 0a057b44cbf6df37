"""`make bench-peers`: its statistics, its report, what it says to Kafka, and its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from bench import kafka_load, kafka_wire, peers, peers_sides
from bench.load import Frames, count_frames
from bench.peers_report import (
    A_TRY,
    KAFKA,
    MEASURES,
    NOT_THE_SAME,
    OURS,
    PULSAR,
    SHORT,
    SYSTEMS,
    Machine,
    Measure,
    Report,
    Spread,
    cells,
    circumstances,
    headings,
    page,
    ratios,
    rows,
    short_page,
    spread,
)
from harness.limits import PATIENCE_S
from scripts.make_benchmarks import PAGES, README, replaced, section
from tests.meta.tree import ROOT

MORE = Measure("pipelined", "publish", "/s")
LESS = Measure("single_p50", "publish, p50", "ms", less=True)
MACHINE = Machine("a processor", 2, 24.0, "a system", 0.1, 0.2, 1.5)


def report(samples: dict[str, dict[str, list[float | None]]], *failures: str) -> Report:
    versions = {OURS: "0.1", PULSAR: "5.0.0-M1", KAFKA: "4.2.0"}
    return Report("2026-01-01", MACHINE, versions, 3, 3.0, samples, list(failures))


WHOLE = report(
    {
        measure.key: {OURS: [4.0, 8.0, 6.0], PULSAR: [2.0, 2.0, 2.0], KAFKA: [1.0, None, 3.0]}
        for measure in MEASURES
    }
)


def test_a_median_has_the_least_and_the_greatest_beside_it() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0, 2)


def test_a_turn_that_failed_is_not_a_zero() -> None:
    assert spread([3.0, None, 1.0]) == Spread(2.0, 1.0, 3.0, 2)
    assert spread([None]) is None
    assert spread([]) is None


def test_a_ratio_is_of_one_turn() -> None:
    """The machine was twice as fast in the second turn, for both: the ratio does not see it."""
    samples: dict[str, list[float | None]] = {
        OURS: [100.0, 200.0, None],
        PULSAR: [50.0, 100.0, 80.0],
    }
    assert ratios(MORE, samples, PULSAR) == [2.0, 2.0]


def test_above_one_is_better_where_less_is_wanted() -> None:
    assert ratios(LESS, {OURS: [0.5], PULSAR: [2.0]}, PULSAR) == [4.0]
    assert ratios(MORE, {OURS: [0.5], PULSAR: [2.0]}, PULSAR) == [0.25]


def test_a_line_has_ratios_first_and_a_dash_where_nothing_is_known() -> None:
    found = report({"crowd": {OURS: [100.0, 300.0], PULSAR: [50.0, 100.0], KAFKA: [None, None]}})
    assert headings(found) == ["measure", "x Pulsar", "x Kafka", *SYSTEMS]
    (line,) = cells(found)
    assert line[1:] == ["2.5 (2.0-3.0)", "-", "200/s (100-300)", "75/s (50-100)", "-"]


def test_bench_diff_gets_our_medians_and_the_ratios() -> None:
    found = rows(report({"crowd": {OURS: [100.0, 300.0], PULSAR: [50.0, 100.0], KAFKA: [None]}}))
    assert [(row.value, row.anchor, row.ratio, row.samples) for row in found] == [
        (200.0, PULSAR, 2.5, 2)
    ]
    assert len({row.measure for row in rows(WHOLE)}) == 2 * len(MEASURES)


def test_the_page_names_machine_versions_noise_and_failures() -> None:
    text = page(report(WHOLE.samples, "turn 1 of 3  Kafka: crowd: refused"))
    for told in ("a processor", "2 cores", "5.0.0-M1", "4.2.0", "load average 0.2", "3 turns"):
        assert told in text
    assert "- failed: turn 1 of 3  Kafka: crowd: refused" in text
    assert msgspec.json.decode(msgspec.json.encode(WHOLE), type=Report) == WHOLE


def test_a_try_says_that_it_is_one() -> None:
    quiet = msgspec.structs.replace(MACHINE, load_before=0.1)
    assert A_TRY not in circumstances(msgspec.structs.replace(WHOLE, machine=quiet))
    assert A_TRY in circumstances(msgspec.structs.replace(WHOLE, turns=1))
    busy = msgspec.structs.replace(MACHINE, load_before=3.0)
    assert A_TRY in circumstances(msgspec.structs.replace(WHOLE, machine=busy))


def test_a_section_is_replaced_and_nothing_else() -> None:
    for name, written in PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        inside = written(WHOLE)
        changed = replaced(text, inside)
        assert section(changed) == inside.strip("\n")
        assert replaced(replaced(changed, section(text)), inside) == changed


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_have_the_shape_that_the_program_writes(name: str) -> None:
    """Figures are of their day; measures, columns and what is not the same are of this tree."""
    known = table(PAGES[name](WHOLE))
    inside = section((ROOT / name).read_text("utf-8"))
    if name == README and not inside:
        pytest.skip("nothing is measured yet")
    written = table(inside)
    assert written[0] == known[0]
    assert [line[0] for line in written] == [line[0] for line in known]
    if name != README:
        notes = [f"- {note}" for note in NOT_THE_SAME]
        lines = inside.splitlines()
        assert [line for line in lines if line.startswith("- ")][: len(notes)] == notes


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r" *\| *", line.strip("|").strip()) for line in lines]


def test_the_readme_shows_measures_that_there_are() -> None:
    assert set(SHORT) <= {measure.key for measure in MEASURES}
    assert len(table(short_page(WHOLE))) == 2 + len(SHORT)


# --- what is sent, and what is made of answers


def test_a_refusal_is_not_counted_as_a_receipt() -> None:
    frames = Frames(1, bytes(10), 1)
    receipt = struct.pack(">II", 8, 4) + b"\x08\x07\x42\x00"
    refusal = struct.pack(">II", 8, 4) + b"\x08\x08\x42\x00"
    assert count_frames(refusal)[0] == 1
    frames.look_at(receipt)
    with pytest.raises(ConnectionError, match="refused"):
        frames.look_at(refusal)


def test_records_for_kafka_have_their_lengths_and_checksum() -> None:
    made = kafka_wire.batch(bytes(1024), 15, 1_700_000_000_000)
    _, length, _, magic, checksum = struct.unpack_from(">qiibI", made)
    assert len(made) == length + 12
    assert magic == 2
    assert checksum == crc32c(made[21:])
    assert struct.unpack_from(">i", made, 57) == (15,)
    # The first one, by hand: length 1031 as a zigzag varint, then attributes, deltas, no key.
    assert made[61:70] == bytes.fromhex("8e10 00 00 00 01 8010 00")


def test_what_kafka_answers_to_a_reader() -> None:
    topic, records = "backlog", b"".join(kafka_wire.batch(b"x", 2, 0) for _ in range(3))
    part = struct.pack(">ihqqqii", 0, 0, 6, 6, 0, -1, -1)
    head = struct.pack(">iihiih", 7, 0, 0, 0, 1, len(topic)) + topic.encode()
    answer = head + struct.pack(">i", 1) + part + struct.pack(">i", len(records) + 30)
    # The last batch is cut off, as it is where an answer is full.
    found = kafka_wire.fetched(answer + records + records[:30], topic, 0)
    assert found.records == 6


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        (kafka_wire.PRODUCE, "00000001 00 02 026f 02 00000000 0033"),
        (kafka_wire.TXN_OFFSET_COMMIT, "00000001 00 00000000 02 026f 02 00000000 0033"),
        (kafka_wire.END_TXN, "00000001 00 00000000 0033 0000000000000005 0007 00"),
        (kafka_wire.INIT_PRODUCER_ID, "00000001 00000000 0033 0000000000000005 0007"),
        (kafka_wire.CREATE_TOPICS, "00000001 00000000 00000001 0001 6f 0033 ffff"),
        (kafka_wire.LIST_OFFSETS, "00000001 00000001 0001 6f 00000001 00000000 0033"),
    ],
)
def test_the_error_of_an_answer_is_found(api: int, answer: str) -> None:
    data = bytes.fromhex(answer)
    assert kafka_wire.error_of(api, data) == 51
    if api in (kafka_wire.END_TXN, kafka_wire.INIT_PRODUCER_ID):
        assert kafka_wire.producer_of(api, data) == (5, 7)


def test_a_request_has_its_length_and_a_place_for_its_number() -> None:
    frame = kafka_wire.produce("t", 3, b"records")
    assert struct.unpack_from(">i", frame) == (len(frame) - 4,)
    assert frame[kafka_wire.CORRELATION] == bytes(4)
    assert frame.endswith(struct.pack(">ii", 3, 7) + b"records")


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_answers_of_kafka_that_come_in_pieces(size: int) -> None:
    answers = [bytes([number]) * length for number, length in enumerate((4, 200, 1, 90))]
    data = b"".join(struct.pack(">i", len(each)) + each for each in answers)

    async def taken() -> list[bytes]:
        link, found = kafka_load.Link(), list[bytes]()
        link._waiting += [found.append] * len(answers)
        for at in range(0, len(data), size):
            link.data_received(data[at : at + size])
        return found

    assert asyncio.run(taken()) == answers


# --- the program


def test_without_java_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "lacking", lambda: "not installed: java, mvn")
    assert peers.prepared([OURS]) is None
    said = peers.prepared([OURS, PULSAR])
    assert said is not None
    assert "Java 17" in said
    assert "not installed: java, mvn" in said


def test_a_load_that_fails_is_told_and_the_others_go_on() -> None:
    error = subprocess.CalledProcessError(1, "load", stderr="Traceback\nConnectionError: refused\n")
    assert peers.reason_of(error) == "ConnectionError: refused"
    turn = peers.Turn(0.1, lambda step: None)

    def fail() -> None:
        raise error

    turn._try("crowd", fail)
    turn._try("single", lambda: None)
    assert turn.failures == ["crowd: ConnectionError: refused"]


def test_versions_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jars = "/m2/kafka-clients-4.2.0.jar:/m2/kafka_2.13-4.2.0.jar"
    monkeypatch.setattr(type(peers_sides.PROJECTS[KAFKA]), "class_path", lambda self: jars)
    assert peers_sides.version_of(KAFKA) == "4.2.0"


@pytest.mark.slow
@pytest.mark.soak  # some thirty processes, one after the other
def test_a_run_of_ours_alone(tmp_path: Path) -> None:
    """Every load of a turn, for a moment; and the file that the page is written from."""
    whole = tmp_path / "report.json"
    code = (
        "import sys; from pathlib import Path; from bench import peers;"
        "peers.WHOLE = Path(sys.argv[1]); peers.keep = lambda *a: None;"
        f"sys.argv = ['peers', '--turns', '1', '--seconds', '0.1', '--systems', {OURS!r}];"
        "sys.exit(peers.main())"
    )
    done = run(tmp_path, "-c", code, str(whole))
    said = done.communicate(timeout=PATIENCE_S)[0]
    assert done.returncode == 0, said
    found = msgspec.json.decode(whole.read_bytes(), type=Report)
    assert found.failures == []
    assert set(found.samples) >= {measure.key for measure in MEASURES}
    assert all(spread(values[OURS]) for values in found.samples.values())


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_server(tmp_path: Path) -> None:
    options = ("--turns", "1", "--seconds", "60", "--systems", OURS)
    process = run(tmp_path, "-m", "bench.peers", *options)
    assert process.stdout is not None
    while "pipelined" not in (line := process.stdout.readline()):
        assert line, "it ended by itself"
    (server,) = [pid for pid in children(process.pid) if "serve" in command_of(pid)]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert not Path(f"/proc/{server}").exists()
    assert not list(tmp_path.iterdir()), "its folders are gone, too"


def run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
