// SPDX-License-Identifier: Apache-2.0

// Package gds moves bytes between device memory and files of one process by NVIDIA's cuFile
// (GPUDirect Storage). With nvidia-fs, or PCI P2PDMA, the disk reads and writes the memory of the
// card directly. Otherwise cuFile works in its compat mode: it copies through host memory, as the
// engine's chain does. Explain says which of the two it is.
//
// The package is experimental: with NVIDIA's libcufile it has run only in compat mode. Everything
// else is tested with a software stand-in for the library.
//
// The backend opens libcufile at run time, and only if libcuda has found a device. It registers
// files and memory with cuFile once. It splits a batch into requests of bounded size. A table
// bounds the requests in flight; threads in C hand them to cuFile, in batches or one by one
// (Config.Way, mover.go). Package internal/files holds the code that does not depend on cuFile.
//
// # Blocks
//
// For an unaligned write, cuFile reads the whole blocks, changes them and writes them back, which
// overwrites what others write to these blocks meanwhile. The backend therefore gives cuFile only
// whole blocks. The edges of a write, at most a part of a block each, go through host memory and
// the page cache. The two kinds of write to a file never run at the same time.
//
// # Proof that nothing lands later
//
// Peers access a file only through this process, and all requests to cuFile are in the table.
// Revoke, Cancel and Close start no more requests and wait until those in flight have ended, since
// cuFile cannot cancel a single request. If a cuFile batch times out, its requests have ended once
// the batch is cancelled and destroyed. The three calls wait as long as a disk does not answer.
package gds
