// SPDX-License-Identifier: Apache-2.0

// Package cuda moves bytes between HBM and DRAM, and between HBM and HBM: batches of copies by
// the copy engines, and patterns of small entries by the gather kernel of the package cuda at
// the root of this module. The peer is a backend of this process or, with Config.Peers, a backend
// of another process of the same host and user, whose HBM this process maps.
//
// The package is experimental: it has run on one model of card, an H100. Two cards in one process,
// and errors of the CUDA driver, are tested only with a software stand-in for the driver.
//
// # The way of a batch
//
//	program            backend                          thread of a stream (csrc/cuda)
//	Submit ----------> check, enter memories
//	                   copies on a stream ------------> waits for their event, puts the next
//	                                                    chunk on the stream, and at the end the
//	                   ring of ends <------------------ batch into the ring
//	Poll <------------ finish: leave memories
//
// Submit and finish are in initiator.go, patterns in pattern.go. Poll takes completions off the
// ring. So do a Revoke that waits for them, and, where another process waits, the goroutine attend.
// A device (device.go) has its streams. A program can order its own streams with transfers
// (order.go), and compute digests of cells in device memory (sum.go). Memory is registered
// (memory.go), pinned (pins.go), or allocated by AllocDevice (block.go).
//
// # Other processes
//
// A peer (peer.go) in another process has a link (link.go), the importer's side of the connection.
// The owner of the memory keeps a client for each importing process, and an export for each import
// (owner.go). The protocol is in wire.go.
//
// # Proof that nothing lands later
//
// A CUDA event after the last copy of each batch shows that the batch has ended (proof.go). Revoke
// refuses new batches, cancels the copies that are not yet on a stream, and waits for the events.
//
// Another process counts each batch in a page of shared memory before it puts copies on a stream.
// It then checks that its import is still good, and takes the count back when the event has come.
// If the count does not fall for longer than Config.RevokeGrace, the process is frozen or was
// killed during a batch. Revoke then replaces the physical memory under the range. The death of the
// process is no proof: its copies may go on in a CUDA context that a child process keeps alive.
package cuda
