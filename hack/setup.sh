#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs what the tests need on Debian and Ubuntu when run as root, and says
# what to install otherwise. Quick and silent when all is there.
set -eu

# The Go of go.mod; older ones fetch it by themselves when they may.
if ! command -v go >/dev/null 2>&1; then
	echo "setup: Go is missing: install it from https://go.dev/dl (see go.mod for the version)" >&2
	exit 1
fi

missing=
command -v gcc >/dev/null 2>&1 || missing="$missing gcc"
command -v make >/dev/null 2>&1 || missing="$missing make"
# The headers of the C library: cgo and the race detector need them.
printf '#include <stdlib.h>\n' | { ! command -v gcc >/dev/null 2>&1 || gcc -E - >/dev/null 2>&1; } ||
	missing="$missing libc6-dev"
case $missing in *gcc*) missing="$missing libc6-dev" ;; esac
needed=$missing

# For the program in C++ of the C ABI's tests, which say so and skip without.
command -v g++ >/dev/null 2>&1 || missing="$missing g++"

# For the program in C of examples, which is built as its users build.
command -v pkg-config >/dev/null 2>&1 || missing="$missing pkg-config"

# For the tests of the Python package, which say so and skip without.
python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
command -v openssl >/dev/null 2>&1 || missing="$missing openssl"

# UCX: the library that is opened at run time, the headers that the declarations
# are held against, the tool that is measured beside. Tests say so and skip without.
ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0' || missing="$missing libucx0"
[ -e /usr/include/ucp/api/ucp.h ] || missing="$missing libucx-dev"
command -v ucx_perftest >/dev/null 2>&1 || missing="$missing ucx-utils"

# Verbs: the library, its headers, the benchmarks that stand beside, and what the guest for
# tests is made of. hack/guest/run fetches the latter into a cache where they are not.
has() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
[ -e /usr/include/infiniband/verbs.h ] || missing="$missing libibverbs-dev"
[ -e /etc/libibverbs.d/rxe.driver ] || missing="$missing ibverbs-providers librdmacm1"
has ibv_devinfo ibverbs-utils
has ib_write_bw perftest
has qemu-system-x86_64 qemu-system-x86
has ip iproute2
# Files: what the benchmark of a disk stands beside, and what tests make block devices with.
has fio fio
has losetup mount
has mkfs.ext4 e2fsprogs
has kmod kmod
has cpio cpio
{ command -v busybox >/dev/null && ! ldd "$(command -v busybox)" >/dev/null 2>&1; } || missing="$missing busybox-static"
# linux/arm64: a compiler, and what runs its programs here.
has aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
[ -e /usr/aarch64-linux-gnu/include/stdlib.h ] || missing="$missing libc6-dev-arm64-cross"
has qemu-aarch64-static qemu-user-static
# The checker of the models in spec/.
has spin spin
# The compiler of the committed modules for cards, where the distribution has it.
clang() {
	command -v clang-19 >/dev/null 2>&1 || ! apt-cache show clang-19 >/dev/null 2>&1 || echo " clang-19"
}
missing="$missing$(clang)"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "setup: missing:$missing" >&2
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
	[ -z "$said" ] || echo "$said" >&2
	return "$rc"
}

export DEBIAN_FRONTEND=noninteractive
echo "setup: installing$missing"
apt update || [ -z "$needed" ]
case $missing in *clang-19*) ;; *) missing="$missing$(clang)" ;; esac # the lists may be new
# shellcheck disable=SC2086 # a list of packages
apt install -y --no-install-recommends $missing ||
	[ -z "$needed" ] # what tests skip without is no reason to fail
