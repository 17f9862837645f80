// SPDX-License-Identifier: Apache-2.0

// Package cuda moves bytes between HBM and DRAM, and between HBM and HBM: batches of copies by
// the copy engines, and patterns of small entries by the gather kernel of the package cuda at
// the root of this module. The other side is a backend of this process or, with Config.Peers, one
// of another process of the same host and user, whose HBM is mapped here.
//
// The package is experimental: one card has met it, an H100. Two cards of one process, and what
// commands the driver to fail, have met a software stand-in of the driver alone.
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
// Submit and finish are in initiator.go, patterns in pattern.go. The first of these takes ends off
// the ring: Poll, a revoke, or, where another process waits for them, a goroutine. A
// device (device.go) has its streams; streams of the program can be ordered with transfers
// (order.go), and cells in its memory are summed (sum.go). Memory is registered (memory.go), pinned
// (pins.go), or made by AllocDevice (block.go).
//
// # Other processes
//
// A peer (peer.go) of another process has a link (link.go) to its owner, which knows the process as
// a client and what it was given as its exports (owner.go). Both speak as wire.go says.
//
// # Proof that nothing lands later
//
// The event behind the last copy of a batch (proof.go). Revoke refuses batches from then on, has
// those under way drop what is not yet on a stream, and waits for the events. Another process
// announces each batch in a page of shared memory before anything of it is on a stream, looks then
// whether its import is still good, and takes the announcement back when the event has ended. A
// process that stays silent for longer than Config.RevokeGrace loses the memory: other memory comes
// under the range. So does one that was killed in a batch: its copies may go on in a context that a
// child of it keeps.
package cuda
