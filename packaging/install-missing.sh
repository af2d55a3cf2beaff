#!/bin/bash
# Installs what a build needs and this machine lacks; says what. Does nothing where nothing is missing.
# usage: install-missing.sh build|check
set -eu

missing=()
need_command() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need_file() {
	local found
	found=$(find /usr/include /usr/local/include /usr/lib /usr/local/lib -path "*/$1" -print -quit 2>/dev/null)
	[ -n "$found" ] || missing+=("$2")
}

need_command cc gcc
need_command cmake cmake
need_command ninja ninja-build
need_file sodium.h libsodium-dev
need_file libsodium.a libsodium-dev
need_file popt.h libpopt-dev
need_file libexpat.a libexpat1-dev
need_file cjson/cJSON.h libcjson-dev
need_file infiniband/verbs.h libibverbs-dev
need_file rdma/rdma_cma.h librdmacm-dev
if [ "${1:-build}" = check ]; then
	need_file cmocka.h libcmocka-dev
	need_command c++ g++            # the tests' GPU kernels, for machines without GPUs
	need_command ip iproute2
	need_command ethtool ethtool
	need_command iptables iptables         # a network that loses packets by itself
	need_command python3 python3
	need_command pkg-config pkg-config
	# Unmodified RDMA programs that the software card must run.
	need_command ibv_devinfo ibverbs-utils
	need_command ib_write_bw perftest
	need_command rping rdmacm-utils
	need_command ibstat infiniband-diags
	need_command ucx_info ucx-utils
	need_command fi_pingpong libfabric-bin
	need_command ompi_info openmpi-bin
	need_file pyverbs/__init__.py python3-pyverbs
	[ -d /usr/share/doc/rdma-core ] || missing+=(rdma-core)    # its documentation holds its tests
	# An independent check of the packets' CRC, and a guest with the kernel's RoCE at the other end of the wire.
	need_file scapy/contrib/roce.py python3-scapy
	if [ "$(uname -m)" = x86_64 ]; then
		need_command qemu-system-x86_64 qemu-system-x86
		need_command cpio cpio
		need_command modprobe kmod
		need_file librxe-rdmav*.so ibverbs-providers
		if ! busybox=$(command -v busybox) || ldd "$busybox" >/dev/null 2>&1; then missing+=(busybox-static); fi
	fi
fi
# The guest's kernel is unpacked, never installed.
kernel_cache=/var/cache/telpher
want_kernel() {
	[ "$1" = check ] && [ "$(uname -m)" = x86_64 ] && command -v apt-get >/dev/null 2>&1 || return 1
	! compgen -G '/lib/modules/*/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko' >/dev/null && ! compgen -G "$kernel_cache/linux-image-*.deb" >/dev/null
}
kernel=
if want_kernel "${1:-build}"; then kernel=yes; fi
[ ${#missing[@]} -gt 0 ] || [ -n "$kernel" ] || exit 0

mapfile -t missing < <(printf '%s\n' ${missing[@]+"${missing[@]}"} | sort -u | sed '/^$/d')
echo "Missing here: ${missing[*]}${kernel:+ a kernel for the guest}"
if ! command -v apt-get >/dev/null 2>&1; then
	echo "This machine has no apt-get. Install these with its own package manager (the names are Debian's), then try again." >&2
	exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
	command -v sudo >/dev/null 2>&1 || { echo "Installing needs root or sudo: run as root: apt-get install ${missing[*]}" >&2; exit 1; }
	as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
if [ ${#missing[@]} -gt 0 ]; then
	echo "Installing with apt-get: ${missing[*]}"
	"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
if [ -n "$kernel" ]; then
	package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }')
	# Without it the test that needs it is skipped.
	if [ -n "$package" ]; then
		echo "Downloading $package into $kernel_cache"
		"${as_root[@]}" mkdir -p "$kernel_cache"
		"${as_root[@]}" bash -c "cd '$kernel_cache' && apt-get download -qq '$package'" || echo "It can't be downloaded."
	fi
fi
