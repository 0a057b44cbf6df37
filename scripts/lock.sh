#!/bin/sh
# Resolves pyproject.toml into requirements/*.txt: versions and hashes for every supported Python
# and system, without an address or a path. Run by `make lock`; UPGRADE=1 takes newer versions.
set -eu
cd "$(dirname "$0")/.."

uv=.venv/bin/uv
upgrade=${UPGRADE:+--upgrade}

compile() { # output, then the sources and options of uv
    output=$1
    shift
    # shellcheck disable=SC2086  an empty $upgrade is no argument
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --no-header --no-annotate $upgrade \
        --output-file "$output" "$@"
    printf '# Made by `make lock`; do not edit.\n' | cat - "$output" >"$output.new"
    mv "$output.new" "$output"
}

# What the set-up itself runs: uv, and setuptools, since PySpark comes as source only.
printf 'uv\nsetuptools\n' | compile requirements/uv.txt -
compile requirements/runtime.txt pyproject.toml
# The dev lock agrees with the locks of runtime and set-up in every version that both name.
compile requirements/dev.txt pyproject.toml --group dev --constraints requirements/runtime.txt \
    --constraints requirements/uv.txt
# The last PySpark that Spark's Kafka connector can be had for (make bench-spark PEERS=1).
printf 'pyspark==4.2.0\n' | compile requirements/peers.txt -
# What Spark Connect's client needs beside Spark, for its one test: with pandas installed Spark, and
# so our sessions, act otherwise, hence it is in no other lock.
printf 'pandas\ngrpcio-status\nzstandard\n' | compile requirements/connect.txt - \
    --constraints requirements/dev.txt
for extra in arrow avro encryption java otel spark testing; do
    compile "requirements/$extra.txt" pyproject.toml --extra "$extra" \
        --constraints requirements/runtime.txt
done
