// SPDX-License-Identifier: Apache-2.0

// Package gds moves bytes between device memory and files of one process by NVIDIA's cuFile
// (GPUDirect Storage): a File segment is a region like any other, and with nvidia-fs, or PCI
// P2PDMA, the disk reads and writes the memory of the card itself. Where it cannot, cuFile works in
// its compat mode, by way of host memory, as the engine's chain does: Explain says which it is.
//
// The package is experimental: NVIDIA's libcufile has met it in compat mode alone, all else is
// tested over a software stand-in.
//
// libcufile is opened at run time, and only where libcuda has found a device. Files and memory are
// registered with it once. A batch becomes requests of bounded size, a bounded table of which is
// with threads in C that hand them to cuFile as batches or one by one (Config.Way; mover.go).
// Package internal/files has all that is not cuFile's.
//
// # Blocks
//
// Where a write is not aligned, cuFile reads whole blocks, changes and writes them, and undoes what
// others write there meanwhile. It is therefore given whole blocks alone: the edges of a write go
// by way of host memory and the page cache. Both kinds of write to a file are never under way at
// once.
//
// # What proves that nothing lands later
//
// Only this process reaches a file, and nothing is with cuFile that is not in the table:
// Revoke, Cancel and Close start nothing more and wait for the end of what is under way, since
// cuFile cannot recall it. What has timed out in a batch has ended when the batch was cancelled and
// destroyed. A disk that does not answer holds them up.
package gds
