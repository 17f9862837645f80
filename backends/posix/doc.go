// SPDX-License-Identifier: Apache-2.0

// Package posix moves bytes between host memory and files or block devices of one process. A
// program registers a file as a region, with a Segment of kind File.
//
// The backend splits a batch into requests. Whole blocks bypass the page cache (O_DIRECT) and move
// straight between the disk and the program's memory. The rest of a read goes through aligned
// bounce buffers, the rest of a write through the page cache. A table bounds the requests that the
// kernel has at a time. They reach the kernel by io_uring (ring.go) or, where the kernel refuses
// that, by threads that call preadv and pwritev (threads.go). Package internal/files holds the code
// that both paths share.
//
// A program that also writes the file by other means must not write to pages that the backend
// writes.
//
// Revoke, Cancel and Close start no more requests, cancel those in flight and wait until they have
// ended. They wait as long as a disk does not answer: user space cannot end a request that the disk
// has accepted.
package posix
