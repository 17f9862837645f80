// SPDX-License-Identifier: Apache-2.0

// Package handoff hands the KV blocks of a request over from a prefill process
// to a decode process, layer by layer, while the prefill still computes.
//
// The prefill side is a Sender, the decode side a Receiver. Both talk through
// engine notifications, which a Mux deals out, and the bytes go as one-sided
// writes:
//
//	sender                                receiver
//	Begin: request, hashes of its blocks
//	                                      finds the blocks that it has already,
//	                                      waits for room for the others, and
//	                                      leases each of those out
//	                                      Grant: a lease for each missing block
//	Layer, behind the bytes of a layer    Request.Layers
//	Done
//	                                      revokes the leases, publishes the blocks
//	                                      Taken; Request.Done
//
// Either side may end it at any moment. What holds then, always:
//
//   - The sender first aborts its transfers, and tells the receiver when that
//     has returned.
//   - The receiver first revokes the leases, and gives the blocks back to the
//     pool when that has returned. A block whose lease cannot be revoked is lost
//     to the pool (Stats.Quarantined) until the engine has found the proof.
//   - Each side learns why, as an *EndError, and every wait is bounded by a
//     limit of its configuration.
//
// # Groups of ranks
//
// GroupSender and GroupReceiver hand a request over from several prefill ranks to several decode
// ranks, whose layouts may differ, by a layout.Plan. Each rank has a connection to each rank of
// the other group, also where no bytes go between them:
//
//	each sending rank                      each receiving rank
//	                                       Open: leases the blocks of the request
//	Begin: plan, span; where the receiver
//	reads, its blocks and their leases
//	                                       Grant: where the sender writes, its blocks
//	                                       and their leases
//	Layer, behind the bytes of an edge,
//	or: the receiver may read it
//	                                       Ready, once all edges that carry it are there
//	Done
//	                                       revokes the leases once all senders are done
//	                                       Taken; GroupRequest.Done
//
// Begin and Open meet by the number of the request, in any order. An end on any rank goes to all
// ranks of the other group at once, and each of those passes it on to all of this one: every rank
// learns it from the first that tells, and has a proof of its own that nothing lands in its blocks
// any more. A receiver that is done stays done, also when others fail. The lists of blocks go
// along with Begin and Grant, since the rank that moves the bytes names both ends.
package handoff
