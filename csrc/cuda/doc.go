// SPDX-License-Identifier: Apache-2.0

// Package cuda reaches the devices of NVIDIA's driver, libcuda, which Load opens at run time; with
// CGO_ENABLED=0 there is none, and Open says so. calls.h has libcuda in our own words.
//
// A Device is a card; device.c makes its context current in every call. A Mover moves batches on
// the streams of a card, and puts their ends into a ring:
//
//   - ends.c: the further functions of libcuda, and the ring;
//   - mover.c: movers, their workers (a stream with a thread), and what the threads do;
//   - feed.c, stage.c: from batches to copies and launches, in chunks, and what a processor
//     gathers;
//   - memory.c, share.c: pinned memory, which device an address is of, and memory of devices;
//   - stream.c: streams and events of the program.
package cuda
