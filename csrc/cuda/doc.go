// SPDX-License-Identifier: Apache-2.0

// Package cuda reaches the devices of NVIDIA's driver, libcuda, which Load opens at run time. With
// CGO_ENABLED=0 Open returns an error that says so. calls.h declares the functions of libcuda, so
// that NVIDIA's headers are not needed to build.
//
// A Device (device.c) is a card with a stream; its context is made current in every call, and the
// caller waits for the work. A Mover (mover.c) moves batches on streams of a card that it shares,
// and puts their ends into a ring: a worker is a stream with a thread. feed.c puts the copies and
// launches of a batch on a stream, in chunks; stage.c has a processor gather. memory.c knows which
// device an address is of, and has memory of devices, which other processes may map.
package cuda
