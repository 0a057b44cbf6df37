"""The .proto against what was generated from it, the lists beside it, and the documentation."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from magnetar.errors import WireCode
from magnetar.wire.commands import MEMBERS, NAMES, SENT_BY, TYPES, Side
from magnetar.wire.pb import pulsar_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "magnetar/wire/pb"


def test_the_committed_modules_are_what_protoc_makes(tmp_path: Path) -> None:
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv in this tree")
    made = tmp_path / "made.pb"
    subprocess.run(
        [
            *(python, "-m", "grpc_tools.protoc", f"--proto_path={FOLDER}=src/magnetar/wire"),
            *(f"--descriptor_set_out={made}", f"--pyi_out={tmp_path}", f"{FOLDER}/pulsar.proto"),
        ],
        cwd=ROOT,
        check=True,
    )
    committed = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    [fresh] = FileDescriptorSet.FromString(made.read_bytes()).file
    assert _without_names_for_json(fresh) == _without_names_for_json(committed)
    assert _syntax(tmp_path / FOLDER) == _syntax(Path(pb.__file__).parent)


def test_the_script_is_a_shell_script_without_errors() -> None:
    shell = shutil.which("sh")
    assert shell is not None
    subprocess.run([shell, "-n", ROOT / "scripts" / "protoc.sh"], check=True)


def test_each_command_has_its_member_and_its_side() -> None:
    fields = pb.BaseCommand.DESCRIPTOR.fields_by_name
    assert {fields[member].number for member in MEMBERS.values()} == set(NAMES)
    assert all(fields[member].number == number for number, member in MEMBERS.items())
    assert len(fields) == len(NAMES) + 1
    assert SENT_BY[Side.CLIENT] | SENT_BY[Side.SERVER] == set(NAMES)
    both = {NAMES[number] for number in SENT_BY[Side.CLIENT] & SENT_BY[Side.SERVER]}
    assert both == {"PING", "PONG", "CLOSE_PRODUCER", "CLOSE_CONSUMER"}


def test_error_codes_agree() -> None:
    assert sorted(pb.ServerError.values()) == sorted(WireCode)


def test_every_command_is_documented_with_its_direction() -> None:
    page = (ROOT / "docs" / "reference" / "protocol.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([CB, ]+) \|", page, re.MULTILINE)
    listed = {name: (int(number), way) for number, name, way in rows}
    assert {name: number for name, (number, _) in listed.items()} == TYPES
    for name, (number, way) in listed.items():
        senders = {side for side in Side if number in SENT_BY[side]}
        shown = {{"C": Side.CLIENT, "B": Side.SERVER}[each] for each in way.split(", ")}
        assert shown == senders, name


def _syntax(folder: Path) -> str:
    """The stubs without regard to their formatting."""
    return ast.dump(ast.parse((folder / "pulsar_pb2.pyi").read_text("utf-8")))


def _without_names_for_json(file: FileDescriptorProto) -> FileDescriptorProto:
    """Compilers differ in whether they write these derived names down."""
    copy = FileDescriptorProto()
    copy.CopyFrom(file)
    for message in copy.message_type:
        for field in message.field:
            field.ClearField("json_name")
    return copy
