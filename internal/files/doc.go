// SPDX-License-Identifier: Apache-2.0

// Package files is the common core of posix and gds, the backends that move bytes between memory
// and files of their own process. Each backend provides a Mover, which hands single requests to the
// kernel or to cuFile; this package does everything else.
//
//	Submit -> job -> queue -> pump: cut -> Mover.Put, Kick -> the kernel or cuFile
//	                           ^                                  |
//	Poll <- completion <- settle <- end <- judge <- Serve <- Mover.Reap
//
// # How a batch is moved
//
// Peer.Submit checks a batch and copies its descriptors into a job: pairs of memories (views) and
// contiguous copies (items). The core does not read the batch after Submit. The job joins a queue,
// in which jobs take turns.
//
// While one of the Config.Depth requests is free, pump cuts the next request from the first job
// (plan.go). Whole blocks bypass the page cache: they move directly between the disk and the
// program's memory. For the remaining bytes, a read uses an aligned buffer of the request, and a
// write goes through the page cache. cuFile reads at any alignment.
//
// The Mover has at most Config.Depth requests at a time. Core.Serve takes those that have ended. It
// copies data from the requests' buffers to the program's memory, submits the rest of partial
// transfers again, and completes a job after its last request. For a durable job, Serve first
// starts an fdatasync of each of its files and waits for it (sync.go). At the end Serve calls pump.
//
// One mutex, Core.Mu, guards all of this. Except in rare calls, the core copies no data, makes no
// system call and does not call C while it holds the mutex.
//
// # The page cache
//
// A write that bypasses the page cache and a write through it must not touch the same page at the
// same time. So the core never runs both kinds of write to one file together, no matter how often
// and with what flags the file was opened.
//
// # Proof that nothing lands after Revoke
//
// Only this process accesses a file, and the table of requests holds every request that the Mover
// has. To revoke a memory, to cancel a batch, or to close a peer or the backend, the core marks the
// jobs, begins no more of their requests, asks the Mover to cancel the others, and waits until none
// of the jobs is left (Core.await). A disk that does not answer delays this: no call can take back
// a request that the disk has.
package files
