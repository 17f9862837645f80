// SPDX-License-Identifier: Apache-2.0

// Package files is the common core of the backends that move bytes between memory and files of
// their own process, posix and gds. A backend has a Mover, which hands single requests to the
// kernel or to cuFile; all else is here.
//
//	Submit -> job -> queue -> pump: cut -> Mover.Put, Kick -> the kernel or cuFile
//	                           ^                                  |
//	Poll <- completion <- settle <- end <- judge <- Serve <- Mover.Reap
//
// # The way of a batch
//
// Peer.Submit checks a batch and copies what it names into a job: pairs of memories (views) and
// contiguous copies (items), so nothing of the batch is read later. The job joins a queue, in which
// jobs take turns.
//
// pump cuts the next request off the first job as long as one of the Config.Depth requests is free
// (plan.go): whole blocks go past the page cache, straight between the disk and the program's
// memory. Of the rest, a read comes through an aligned buffer of the request, a write goes through
// the page cache. cuFile reads at any alignment by itself.
//
// The Mover has at most Config.Depth requests at a time. Core.Serve takes those that have ended,
// copies what came through buffers to where it belongs, begins again what was done in part, and
// completes a job with its last request: a durable one after an fdatasync of each of its files
// that began behind its last byte (sync.go). Then it pumps.
//
// One mutex, Core.Mu, guards all of it. No byte is moved, no system call is made and no call into C
// under it, but in cold calls.
//
// # The page cache
//
// Blocks that were written past the page cache and bytes that were written through it may share a
// page only one after the other. So writes of both kinds to one file are never under way at once,
// however often and with whatever flags the file was opened.
//
// # What proves that nothing lands later
//
// Only this process reaches a file, and nothing is with the Mover that is not in the table of
// requests. To revoke a memory, to cancel a batch, and to close a peer or the backend, the core
// marks the jobs, begins no more of them, has the Mover cancel what is under way,
// and waits until none of them is left (Core.await). A disk that does not answer holds that up:
// nothing in user space ends a request that a disk has.
package files
