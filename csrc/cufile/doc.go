// SPDX-License-Identifier: Apache-2.0

// Package cufile moves bytes between files and memory of GPUs with libcufile, NVIDIA's library for
// GPUDirect Storage.
//
// Load opens libcufile at run time, after libcuda. With CGO_ENABLED=0 it returns an error that says
// so. A Mover has threads of its own. Put queues requests for them (mover.c), and each thread takes
// its share, calls libcufile for one request at a time or for a batch, and writes the outcomes into
// the ring of package csrc/cuda, from which the backend polls them (worker.c). calls.h declares the
// functions of libcufile, so that NVIDIA's headers are not needed to build.
package cufile
