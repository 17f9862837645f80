// SPDX-License-Identifier: Apache-2.0

// Package posix moves bytes between host memory and files or block devices of one process: a File
// segment is a region like any other.
//
// A batch becomes requests: whole blocks go past the page cache, straight between the disk and the
// program's memory; the rest of a read comes through aligned buffers of the backend, the rest of a
// write through the page cache. A bounded table of requests is with the kernel at any time, by
// io_uring (ring.go) or, where that is refused, by threads that call preadv and pwritev
// (threads.go). Package internal/files has all that does not depend on which.
//
// A program that writes a file by other means beside the backend has to keep clear of the pages
// that the backend writes.
//
// Revoke, Cancel and Close start nothing more, cancel what is under way and wait for its end. A
// disk that does not answer holds them up, as nothing in user space ends a request that a disk has.
package posix
