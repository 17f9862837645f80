#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs what a make target needs on Debian and Ubuntu when run as root, after it has printed the
# packages and their size. For another user it prints the command. Quick and silent when all is
# there.
#
#	hack/setup.sh build	a C compiler
#	hack/setup.sh test	what `make test` needs besides
#	hack/setup.sh [all]	what `make test-all` needs besides: emulators, other compilers, headers
#
# Only what all targets need is worth a failure. Without the rest, tests skip and name what is
# missing.
set -eu

what=${1:-all}
case $what in build | test | all) ;; *)
	echo "usage: hack/setup.sh [build|test|all]" >&2
	exit 2
	;;
esac

# The Go of go.mod; older ones fetch it by themselves when they may.
if ! command -v go >/dev/null 2>&1; then
	echo "setup: Go is missing: install it from https://go.dev/dl (see go.mod for the version)" >&2
	exit 1
fi

missing=
lacks() { missing="$missing $*"; }
has() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1; }

# The compiler, with the headers of the C library: cgo and the race detector need them.
build() {
	has make || lacks make
	if ! has gcc; then
		lacks gcc libc6-dev
	elif ! printf '#include <stdlib.h>\n' | gcc -E - >/dev/null 2>&1; then
		lacks libc6-dev
	fi
}

# The Python package and its TLS, network namespaces, loop devices, the checker of the models in
# spec/, and the tool of UCX that the benchmarks are measured beside, with the library.
tests() {
	python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || lacks python3-venv
	has openssl || lacks openssl
	has ip || lacks iproute2
	has losetup || lacks mount
	has mkfs.ext4 || lacks e2fsprogs
	has spin || lacks spin
	has ucx_perftest || lacks ucx-utils
}

# The compiler of the committed modules for cards, where the distribution has it.
clang() {
	has clang-19 || ! apt-cache show clang-19 >/dev/null 2>&1 || lacks clang-19
}

rest() {
	# Programs in C++ and C of the C ABI's tests and of examples/.
	has g++ || lacks g++
	has pkg-config || lacks pkg-config
	# UCX and verbs: headers that our declarations are compared with, providers, tools to measure
	# beside.
	[ -e /usr/include/ucp/api/ucp.h ] || lacks libucx-dev
	[ -e /usr/include/infiniband/verbs.h ] || lacks libibverbs-dev
	[ -e /etc/libibverbs.d/rxe.driver ] || lacks ibverbs-providers librdmacm1
	has ibv_devinfo || lacks ibverbs-utils
	has ib_write_bw || lacks perftest
	# The tool that the benchmark of a disk is measured beside.
	has fio || lacks fio
	# The guest. hack/guest/fetch would download these into its cache.
	has qemu-system-x86_64 || lacks qemu-system-x86
	has kmod || lacks kmod
	has cpio || lacks cpio
	{ has busybox && ! ldd "$(command -v busybox)" >/dev/null 2>&1; } || lacks busybox-static
	# linux/arm64: a compiler, and an emulator for its programs.
	has aarch64-linux-gnu-gcc || lacks gcc-aarch64-linux-gnu
	[ -e /usr/aarch64-linux-gnu/include/stdlib.h ] || lacks libc6-dev-arm64-cross
	has qemu-aarch64-static || lacks qemu-user-static
	clang
}

build
needed=$missing
[ "$what" = build ] || tests
[ "$what" != all ] || rest
[ -n "$missing" ] || exit 0

# size prints what apt-get says of the download and of the disk, where it knows the packages.
size() {
	# shellcheck disable=SC2086 # a list of packages
	LC_ALL=C apt-get -o Debug::NoLocking=1 install --print-uris --no-install-recommends $missing 2>/dev/null |
		sed -n 's|^Need to get \(.*/\)\{0,1\}\(.*\) of archives.*|: \2 to download|p
			s|^After this operation, \(.*\) of additional disk space.*|, \1 on disk|p' | tr -d '\n'
}

if [ "$(id -u)" -ne 0 ] || ! has apt-get; then
	echo "setup: missing:$missing$(! has apt-get || size)" >&2
	echo "setup: install them, on Debian: sudo apt-get install --no-install-recommends$missing" >&2
	[ -n "$needed" ] || exit 0
	exit 1
fi
# apt runs apt-get, and waits some minutes while another one is at work. apt-get itself waits for
# dpkg's lock, and for none of its own.
apt() {
	for pause in 5 10 15 30 60 60 60 60 0; do
		rc=0
		said=$(LC_ALL=C timeout 900 apt-get -qq -o DPkg::Lock::Timeout=300 "$@" 2>&1) || rc=$?
		case $rc:$said in 0:*) break ;; *"Could not get lock"*) sleep "$pause" ;; *) break ;; esac
	done
	[ "$rc" -eq 0 ] || echo "$said" >&2
	return "$rc"
}

export DEBIAN_FRONTEND=noninteractive
echo "setup: missing:$missing: reading the lists of packages"
apt update || [ -z "$needed" ]
case $what:$missing in all:*clang-19*) ;; all:*) clang ;; esac # the lists may be new
echo "setup: installing$missing$(size)"
# shellcheck disable=SC2086 # a list of packages
apt install -y --no-install-recommends $missing ||
	[ -z "$needed" ] # what tests skip without is no reason to fail
