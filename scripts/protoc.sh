#!/bin/sh
# Makes the Python modules of our .proto anew, with the protoc of the dev lock. Run it after a change
# of src/magnetar/wire/pulsar.proto; a test compares what is committed with what it makes.
# An argument is the folder to write to instead of src.
set -eu
cd "$(dirname "$0")/.."

target=${1:-src}
# The full name keeps ours apart from other files called pulsar.proto in one process.
name=magnetar/wire/pb
.venv/bin/python -m grpc_tools.protoc --proto_path="$name=src/magnetar/wire" \
    --python_out="$target" --pyi_out="$target" "$name/pulsar.proto"
