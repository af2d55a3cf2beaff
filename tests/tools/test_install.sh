#!/bin/bash
# cmake --install into a folder of its own: pkg-config and the CMake package build a program that runs; manual pages are there.
set -eu
command -v pkg-config >/dev/null || { echo "skipped: no pkg-config"; exit 77; }
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
cmake --install "$BUILD_DIR" --prefix "$where/usr" >/dev/null
cat >"$where/main.c" <<'C'
#include <nccl.h>
#include <stdio.h>
int main(void) { int v = 0; ncclUniqueId id; if (ncclGetVersion(&v) || ncclGetUniqueId(&id)) return 1; printf("%d\n", v); return 0; }
C
pc=$(dirname "$(find "$where" -name telpher.pc)")
sanitize=${SANITIZE:+-fsanitize=$SANITIZE}
# shellcheck disable=SC2046,SC2086
cc $sanitize "$where/main.c" $(PKG_CONFIG_PATH=$pc pkg-config --define-variable=prefix="$where/usr" --cflags --libs telpher) -o "$where/a"
[ "$("$where/a")" = 22809 ] && echo "ok   pkg-config"
mkdir "$where/project"
cat >"$where/project/CMakeLists.txt" <<'C'
cmake_minimum_required(VERSION 3.25)
project(user C)
find_package(telpher REQUIRED)
add_executable(b ../main.c)
target_link_libraries(b telpher::nccl)
C
cmake -S "$where/project" -B "$where/project/build" -G Ninja -DCMAKE_PREFIX_PATH="$where/usr" -DCMAKE_C_FLAGS="$sanitize" >/dev/null
cmake --build "$where/project/build" >/dev/null
[ "$("$where/project/build/b")" = 22809 ] && echo "ok   CMake package"
find "$where" -path '*/lib/*/telpher/libnccl.so.2' -o -path '*/lib/telpher/libnccl.so.2' | grep -q . && echo "ok   the library has a folder of its own"
calls=$(sed -n -e 's/^TP_NCCL_CALL_([^,]*, \([a-zA-Z]*\),.*/\1/p' -e 's/^[a-zA-Z].*[ *]\(telpher_[a-z_]*\)(.*/\1/p' "$where"/usr/include/telpher/*.h)
[ "$(wc -l <<<"$calls")" -ge 50 ] || { echo "FAIL the headers' calls aren't found"; exit 1; }
for page in telpher.1 telpher-run.1 telpher-perf.1 telpher-explain.1 telpher-env.7 telpher.3 $(sed 's/$/.3/' <<<"$calls"); do find "$where" -name "$page" | grep -q . || { echo "FAIL no $page"; exit 1; }; done
echo "ok   a manual page a call"
"$where/usr/bin/telpher" env | grep -q NCCL_DEBUG && echo "ok   the installed command runs"
find "$where" -path '*/telpher/libnccl-net-telpher.so' | grep -q . && echo "ok   the plug-in for the original NCCL lies beside it"
"$where/usr/bin/telpher" probe --help >/dev/null 2>&1 || exit 0
"$where/usr/bin/rdma_write" --help | grep -q '^Usage: rdma_write' && echo "ok   rdma_write is installed beside it"
